// Rows of neighbouring heads, for kernels whose streams are vectors of numbers of different heads. Included per
// instruction set.

// Call work(batch, first, last) for the numbers of each sequence that a part has, whose rows are of so many vectors.
template <class F>
static void each_row(const Part& part, int64_t row_vectors, const F& work) {
  for (int64_t from = part.first_stream, to; from < part.last_stream; from = to) {
    const int64_t batch = from / row_vectors, end = (batch + 1) * row_vectors;
    to = end < part.last_stream ? end : part.last_stream;
    work(batch, from % row_vectors * kLanes, (to - batch * row_vectors) * kLanes);
  }
}

static int64_t row_floats(const Part& part) { return (part.last_stream - part.first_stream) * kLanes; }
