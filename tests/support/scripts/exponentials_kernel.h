// Exponentials of vector.h. Included per instruction set.

static void exponentials(Form form, const float* x, float* y, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vector v = load(x + i);
    store(y + i, form == kAny ? exponential(v) : form == kNegative ? exponential_of_negative(v) : exponential_of_decay(v));
  }
}
