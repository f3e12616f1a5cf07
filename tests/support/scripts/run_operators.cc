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
#include <sstream>
#include <thread>

#include "../cpp/ort_stand_in.h"

namespace {

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
