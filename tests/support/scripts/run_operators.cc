// Runs operators of the CPU library on threads of its own, in the place of ONNX Runtime: what ThreadSanitizer sees whole.
//
//   run_operators CASES
//
// Every case is computed by one thread, then by several, in two calls at once. Results must be the same, bit for bit; those
// of LinearAttention, whose threads can have segments of a sequence, may differ from one thread's by rounding. CASES:
//
//   case OP TYPE THREADS    TYPE: of activations
//   i NAME INTEGER, f NAME FLOAT, s NAME TEXT      attributes
//   x TYPE RANK DIMS... BYTES, a line's end, and the bytes; or x 0 of an input that is missing
//   y PLACE                 an output, in the memory of that input; -1: in its own
//   run
#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <thread>

#include "library.h"

using Bytes = std::vector<char>;

struct OrtStatus {
  std::string message;
};

struct OrtValue {
  int type = 0;
  std::vector<int64_t> dims;
  Bytes bytes;
};

struct OrtKernelInfo {
  std::map<std::string, int64_t> integers;
  std::map<std::string, float> floats;
  std::map<std::string, std::string> texts;
};

struct OrtKernelContext {
  std::vector<OrtValue> inputs, outputs;
  std::vector<int> places;
  int threads = 1;

  OrtValue& output(size_t index) { return places[index] < 0 ? outputs[index] : inputs[places[index]]; }
};

namespace {

void* table[300];

template <int Place>
void fill(typename linexport::Entry<Place>::Type entry) {
  table[Place] = reinterpret_cast<void*>(entry);
}

template <class T>
OrtStatus* found(const std::map<std::string, T>& all, const char* name, T* out) {
  const auto at = all.find(name);
  if (at == all.end()) return new OrtStatus{"no attribute"};
  *out = at->second;
  return nullptr;
}

size_t bytes_of(int type) { return type == linexport::kFloat ? 4 : type == linexport::kInt64 ? 8 : type == linexport::kBool ? 1 : 2; }

const OrtValue& value_of(const OrtTensorTypeAndShapeInfo* info) { return *reinterpret_cast<const OrtValue*>(info); }

OrtStatus* get_output(OrtKernelContext* call, size_t index, const int64_t* dims, size_t rank, OrtValue** out) {
  OrtValue& value = call->output(index);
  value.dims.assign(dims, dims + rank);
  size_t count = 1;
  for (int64_t dim : value.dims) count *= dim;
  if (call->places[index] < 0) value.bytes.resize(count * bytes_of(value.type));
  *out = &value;
  return nullptr;
}

OrtStatus* parallel(const OrtKernelContext* call, void (*work)(void*, size_t), size_t total, size_t, void* data) {
  std::vector<std::thread> threads;
  const size_t step = call->threads;
  for (size_t first = 0; first < step; ++first)
    threads.emplace_back([=] {
      for (size_t i = first; i < total; i += step) work(data, i);
    });
  for (std::thread& thread : threads) thread.join();
  return nullptr;
}

void fill_table() {
  using namespace linexport;
  fill<CreateStatus>([](int, const char* message) { return new OrtStatus{message}; });
  fill<GetErrorMessage>([](const OrtStatus* status) { return status->message.c_str(); });
  fill<ReleaseStatus>([](OrtStatus* status) { delete status; });
  fill<GetTensorMutableData>([](OrtValue* value, void** out) -> OrtStatus* { return *out = value->bytes.data(), nullptr; });
  fill<GetTensorTypeAndShape>([](const OrtValue* value, OrtTensorTypeAndShapeInfo** out) -> OrtStatus* {
    *out = reinterpret_cast<OrtTensorTypeAndShapeInfo*>(const_cast<OrtValue*>(value));
    return nullptr;
  });
  fill<ReleaseTensorTypeAndShapeInfo>([](OrtTensorTypeAndShapeInfo*) {});
  fill<GetTensorElementType>([](const OrtTensorTypeAndShapeInfo* info, int* out) -> OrtStatus* { return *out = value_of(info).type, nullptr; });
  fill<GetDimensionsCount>([](const OrtTensorTypeAndShapeInfo* info, size_t* out) -> OrtStatus* { return *out = value_of(info).dims.size(), nullptr; });
  fill<GetDimensions>([](const OrtTensorTypeAndShapeInfo* info, int64_t* out, size_t) -> OrtStatus* {
    std::copy(value_of(info).dims.begin(), value_of(info).dims.end(), out);
    return nullptr;
  });
  fill<KernelInfoGetAttributeInt64>([](const OrtKernelInfo* info, const char* name, int64_t* out) { return found(info->integers, name, out); });
  fill<KernelInfoGetAttributeFloat>([](const OrtKernelInfo* info, const char* name, float* out) { return found(info->floats, name, out); });
  fill<KernelInfoGetAttributeString>([](const OrtKernelInfo* info, const char* name, char* out, size_t* size) -> OrtStatus* {
    std::string text;
    if (OrtStatus* status = found(info->texts, name, &text)) return status;
    *size = text.size() + 1;
    if (out) std::memcpy(out, text.c_str(), *size);
    return nullptr;
  });
  fill<KernelInfoGetAttributeInt64Array>([](const OrtKernelInfo*, const char*, int64_t*, size_t*) { return new OrtStatus{"no attribute"}; });
  fill<KernelContextGetInputCount>([](const OrtKernelContext* call, size_t* out) -> OrtStatus* { return *out = call->inputs.size(), nullptr; });
  fill<KernelContextGetOutputCount>([](const OrtKernelContext* call, size_t* out) -> OrtStatus* { return *out = call->places.size(), nullptr; });
  fill<KernelContextGetInput>([](const OrtKernelContext* call, size_t index, const OrtValue** out) -> OrtStatus* {
    *out = call->inputs[index].type ? &call->inputs[index] : nullptr;
    return nullptr;
  });
  fill<KernelContextGetOutput>(get_output);
  fill<KernelContextParallelFor>(parallel);
}

void check(OrtStatus* status) {
  if (!status) return;
  std::cerr << status->message << "\n";
  std::exit(1);
}

struct Case {
  std::string op;
  int activation = 0, threads = 1;
  OrtKernelInfo info;
  OrtKernelContext call;

  // The outputs of `calls` calls at once, each of so many threads.
  std::vector<OrtKernelContext> computed(int threads, int calls) const {
    std::vector<OrtKernelContext> contexts(calls, call);
    for (const linexport::Declaration& declaration : linexport::declarations()) {
      if (declaration.name != op) continue;
      const linexport::CustomOp own(&declaration, activation, threads);
      void* kernel = nullptr;
      check(own.CreateKernelV2(&own, table, &info, &kernel));
      std::vector<std::thread> callers;
      for (OrtKernelContext& context : contexts) {
        context.threads = threads, context.outputs.resize(context.places.size());
        for (size_t i = 0; i < context.outputs.size(); ++i) context.outputs[i].type = own.GetOutputType(&own, i);
        callers.emplace_back([&own, &context, kernel] { check(own.KernelComputeV2(kernel, &context)); });
      }
      for (std::thread& caller : callers) caller.join();
      own.KernelDestroy(kernel);
    }
    return contexts;
  }

  // Whether two outputs are the same but for the rounding of segments.
  bool close(const OrtValue& x, const OrtValue& y) const {
    if (x.bytes == y.bytes) return true;
    if (op != "LinearAttention" || x.type != linexport::kFloat || x.bytes.size() != y.bytes.size()) return false;
    std::vector<float> a(x.bytes.size() / sizeof(float)), b(a.size());
    std::memcpy(a.data(), x.bytes.data(), x.bytes.size()), std::memcpy(b.data(), y.bytes.data(), y.bytes.size());
    float largest = 0, difference = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      largest = std::max(largest, std::abs(a[i]));
      difference = a[i] == b[i] ? difference : std::max(difference, std::abs(a[i] - b[i]));
    }
    return difference <= 1e-5f * largest;
  }

  void run() const {
    OrtKernelContext alone = computed(1, 1)[0];
    std::vector<OrtKernelContext> shared = computed(threads, 2);
    for (size_t i = 0; i < call.places.size(); ++i)
      if (alone.output(i).bytes.empty() || shared[0].output(i).bytes != shared[1].output(i).bytes || !close(alone.output(i), shared[0].output(i)))
        check(new OrtStatus{op + ": other results"});
    std::cout << op << "\n";
  }
};

OrtValue read_value(std::istringstream& words, std::istream& file) {
  OrtValue value;
  size_t rank = 0, bytes = 0;
  if (!(words >> value.type) || value.type == 0) return value;
  words >> rank;
  value.dims.resize(rank);
  for (int64_t& dim : value.dims) words >> dim;
  words >> bytes;
  value.bytes.resize(bytes);
  file.read(value.bytes.data(), bytes);
  return value;
}

}  // namespace

int main(int, char** arguments) {
  fill_table();
  std::ifstream file(arguments[1], std::ios::binary);
  Case own;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string what, name;
    words >> what;
    if (what == "case") own = Case(), words >> own.op >> own.activation >> own.threads;
    if (what == "i") words >> name >> own.info.integers[name];
    if (what == "f") words >> name >> own.info.floats[name];
    if (what == "s") words >> name >> std::ws, std::getline(words, own.info.texts[name]);
    if (what == "x") own.call.inputs.push_back(read_value(words, file));
    if (what == "y") words >> own.call.places.emplace_back();
    if (what == "run") own.run();
  }
}
