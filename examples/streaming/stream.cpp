// An artifact run token by token from C++: the states stay ONNX Runtime's own values from call to
// call and are never copied.
//
//   g++ -std=c++17 stream.cpp -o stream -ldl
//   ./stream [--operators liblinexport_cpu.so] libonnxruntime.so model.onnx states.txt VOCABULARY TOKEN...
//
// With --operators the nodes of linexport's domain are run by that library, otherwise by the functions
// they carry; "linexport plugins path cpu" prints its file.
//
// states.txt has a line for each state, as manifest.json lists them: the names of its past input and
// its present output, the value it begins with, and its shape with a batch of 1. The program prints
// the argmax of the logits after each token, as stream.py does.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "onnxruntime_api.h"

static const void* const* api;

// Call an entry that returns a status; print its message and end the program where it fails.
template <int Place, typename... Arguments>
void call(Arguments... arguments) {
  auto function = reinterpret_cast<typename Entry<Place>::Type>(api[Place]);
  if (OrtStatus* status = function(arguments...)) {
    auto message = reinterpret_cast<Entry<GetErrorMessage>::Type>(api[GetErrorMessage]);
    std::fprintf(stderr, "ONNX Runtime: %s\n", message(status));
    std::exit(1);
  }
}

static void release(OrtValue* value) {
  reinterpret_cast<Entry<ReleaseValue>::Type>(api[ReleaseValue])(value);
}

struct State {
  std::string past, present;
  std::vector<float> first;  // its memory before the first call
  std::vector<int64_t> shape;
};

static std::vector<State> read_states(const char* path) {
  std::vector<State> states;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    State state;
    float initial = 0;
    words >> state.past >> state.present >> initial;
    int64_t size = 1;
    for (int64_t dim; words >> dim; size *= dim) state.shape.push_back(dim);
    state.first.assign(size, initial);
    states.push_back(std::move(state));
  }
  return states;
}

int main(int count, char** arguments) {
  const char* operators = nullptr;
  if (count > 2 && std::string(arguments[1]) == "--operators") {
    operators = arguments[2];
    arguments += 2;
    count -= 2;
  }
  if (count < 6) {
    std::fprintf(stderr, "usage: stream [--operators liblinexport_cpu.so] libonnxruntime.so model.onnx states.txt VOCABULARY TOKEN...\n");
    return 2;
  }
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  auto base = reinterpret_cast<const OrtApiBase* (*)()>(dlsym(library, "OrtGetApiBase"))();
  api = base->GetApi(kApiVersion);
  if (!api) {
    std::fprintf(stderr, "ONNX Runtime %s has no interface of version %u\n", base->GetVersionString(), kApiVersion);
    return 1;
  }

  OrtEnv* environment;
  OrtSessionOptions* options;
  OrtSession* session;
  OrtMemoryInfo* memory;
  call<CreateEnv>(kWarning, "stream", &environment);
  call<CreateSessionOptions>(&options);
  if (operators) call<RegisterCustomOpsLibrary>(options, operators);
  call<CreateSession>(environment, arguments[2], options, &session);
  call<CreateCpuMemoryInfo>(kArena, kDefault, &memory);

  std::vector<State> states = read_states(arguments[3]);
  const size_t vocabulary = std::strtoul(arguments[4], nullptr, 10);
  std::vector<const char*> input_names{"tokens"}, output_names{"output"};
  std::vector<OrtValue*> inputs{nullptr};
  for (State& state : states) {
    input_names.push_back(state.past.c_str());
    output_names.push_back(state.present.c_str());
    OrtValue* value;
    call<CreateTensorWithDataAsOrtValue>(memory, state.first.data(), state.first.size() * sizeof(float),
                                         state.shape.data(), state.shape.size(), kFloat, &value);
    inputs.push_back(value);
  }

  const int64_t shape[] = {1, 1};
  for (int i = 5; i < count; ++i) {
    int64_t token = std::strtoll(arguments[i], nullptr, 10);
    call<CreateTensorWithDataAsOrtValue>(memory, &token, sizeof token, shape, size_t{2}, kInt64, &inputs[0]);
    std::vector<OrtValue*> outputs(output_names.size(), nullptr);
    call<Run>(session, nullptr, input_names.data(), inputs.data(), inputs.size(), output_names.data(),
              output_names.size(), outputs.data());
    void* data;
    call<GetTensorMutableData>(outputs[0], &data);
    const float* logits = static_cast<const float*>(data);
    std::printf("%zu\n", static_cast<size_t>(std::max_element(logits, logits + vocabulary) - logits));
    release(outputs[0]);
    for (OrtValue* input : inputs) release(input);
    std::copy(outputs.begin() + 1, outputs.end(), inputs.begin() + 1);  // present becomes past
  }
  std::fflush(stdout);
  std::_Exit(0);  // what is left is the process's, and ends with it
}
