// An artifact run token by token from C++: the states stay ONNX Runtime's own values from call to
// call and are never copied.
//
//   g++ -std=c++17 stream.cpp -o stream -ldl
//   ./stream [--operators liblinexport_cpu.so] libonnxruntime.so ARTIFACT TOKEN...
//   ./stream [--operators liblinexport_cpu.so] libonnxruntime.so ARTIFACT < VECTORS
//
// A model of tokens: the program prints the argmax of the logits after each token, as stream.py does. A
// model of vectors: it reads the numbers of a step at a time, and prints the output of each as a line.
//
// With --operators the nodes of linexport's domain are run by that library, otherwise by the functions
// they carry; "linexport plugins path cpu" prints its file.
//
// manifest.json names the input and the output with their sizes, and for each state its past input, its
// present output, the value it begins with and its shape.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "json.h"
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
  int type;
  std::vector<float> numbers;  // of a state of float32 before the first call
  std::vector<int64_t> integers;  // of one of int64
  std::vector<int64_t> shape;
};

struct Model {
  std::string input, output;
  size_t taken;  // numbers of a step; 0 for a token
  size_t given;  // numbers of an output: the size of the vocabulary, or of a vector
  std::vector<State> states;
  std::vector<std::string> ones;  // further inputs, of int64, that are 1 for each token: masks
};

[[noreturn]] static void refuse(const std::string& found) { throw std::runtime_error(found); }

// A state of a batch of one. One that grows with the tokens, as keys and values do, begins without any.
static State read_state(const Json& entry) {
  State state{entry["past"].text, entry["present"].text, kFloat, {}, {}, {1}};
  const std::string& type = entry["dtype"].text;
  if (type != "float32" && type != "int64") refuse(state.past + " is of " + type + ", not of float32 or int64");
  const Json& grows = entry["grows"];
  const std::vector<Json>& dims = entry["shape"].list;
  int64_t size = 1;
  for (size_t i = 1; i < dims.size(); ++i) {
    const bool empty = grows.kind != Json::kNull && grows.number == static_cast<double>(i);
    const int64_t dim = empty ? 0 : static_cast<int64_t>(dims[i].number);
    if (dim < !empty || dim > (1 << 24) || (size *= dim) > (1 << 28)) refuse(state.past + " has no usable shape");
    state.shape.push_back(dim);
  }
  const double first = entry["initial"].number;
  if (type == "int64") {
    state.type = kInt64;
    state.integers.assign(size, static_cast<int64_t>(first));
  } else {
    state.numbers.assign(size, static_cast<float>(first));
  }
  return state;
}

// The value of a state before the first call.
static OrtValue* first_value(OrtMemoryInfo* memory, State& state) {
  static float none;  // the address of what has no values
  const bool integers = state.type == kInt64;
  void* data = integers ? static_cast<void*>(state.integers.data()) : state.numbers.data();
  const size_t bytes = integers ? state.integers.size() * sizeof(int64_t) : state.numbers.size() * sizeof(float);
  OrtValue* value;
  call<CreateTensorWithDataAsOrtValue>(memory, bytes ? data : &none, bytes, state.shape.data(), state.shape.size(),
                                       state.type, &value);
  return value;
}

// The fixed last size of a tensor of float32 with so many dimensions.
static size_t last_size(const Json& entry, size_t dims, const std::string& found) {
  const std::vector<Json>& shape = entry["shape"].list;
  const bool usable = entry["dtype"].text == "float32" && shape.size() == dims;
  if (!usable || !(shape.back().number >= 1 && shape.back().number <= (1 << 24))) refuse(found);
  return static_cast<size_t>(shape.back().number);
}

static Model read_model(const std::string& path) {
  std::ifstream file(path);
  if (!file) refuse("it cannot be read");
  std::ostringstream content;
  content << file.rdbuf();
  const std::string text = content.str();
  const Json manifest = JsonReader::read(text);
  Model model{};
  std::set<std::string> carried;
  for (const Json& entry : manifest["states"].list) {
    model.states.push_back(read_state(entry));
    carried.insert(model.states.back().past);
  }
  for (const Json& input : manifest["inputs"].list) {
    const std::string& name = input["name"].text;
    if (carried.count(name)) continue;
    if (input["default"].kind == Json::kNumber && input["default"].number == 1 && input["dtype"].text == "int64") {
      model.ones.push_back(name);
      continue;
    }
    if (!model.input.empty()) refuse("a second input, " + name + ": this program feeds one");
    model.input = name;
    if (input["dtype"].text == "int64" && input["shape"].list.size() == 2) continue;
    model.taken = last_size(input, 3, name + " takes neither tokens nor vectors of float32");
  }
  if (model.input.empty() || manifest["outputs"].list.empty()) refuse("no input, or no output");
  const Json& output = manifest["outputs"].list[0];
  model.output = output["name"].text;
  model.given = last_size(output, 3, "no output of float32 for each step");
  return model;
}

// The numbers of the next step from standard input; false at its end.
static bool read_vector(std::vector<float>& vector) {
  for (size_t n = 0; n < vector.size(); ++n) {
    if (std::scanf("%f", &vector[n]) == 1) continue;
    if (n || !std::feof(stdin)) {
      std::fprintf(stderr, "standard input: expected %zu numbers for each step\n", vector.size());
      std::exit(1);
    }
    return false;
  }
  return true;
}

int main(int count, char** arguments) {
  const char* operators = nullptr;
  if (count > 2 && std::string(arguments[1]) == "--operators") {
    operators = arguments[2];
    arguments += 2;
    count -= 2;
  }
  if (count < 3) {
    std::fprintf(stderr, "usage: stream [--operators liblinexport_cpu.so] libonnxruntime.so ARTIFACT [TOKEN...]\n");
    return 2;
  }
  const std::string folder = arguments[2];
  Model model;
  try {
    model = read_model(folder + "/manifest.json");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s/manifest.json: %s\n", folder.c_str(), error.what());
    return 1;
  }
  if (!model.taken && count == 3) {
    std::fprintf(stderr, "%s takes tokens: give their ids after it\n", folder.c_str());
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
  call<CreateSession>(environment, (folder + "/model.onnx").c_str(), options, &session);
  call<CreateCpuMemoryInfo>(kArena, kDefault, &memory);

  std::vector<const char*> input_names{model.input.c_str()}, output_names{model.output.c_str()};
  std::vector<OrtValue*> inputs{nullptr};
  for (State& state : model.states) {
    input_names.push_back(state.past.c_str());
    output_names.push_back(state.present.c_str());
    inputs.push_back(first_value(memory, state));
  }
  const int64_t shape[] = {1, 1, static_cast<int64_t>(model.taken)};
  int64_t one = 1;
  for (const std::string& name : model.ones) {
    input_names.push_back(name.c_str());
    inputs.push_back(nullptr);
  }
  std::vector<float> vector(model.taken);
  for (int i = 3; model.taken ? read_vector(vector) : i < count; ++i) {
    int64_t token = model.taken ? 0 : std::strtoll(arguments[i], nullptr, 10);
    if (model.taken)
      call<CreateTensorWithDataAsOrtValue>(memory, vector.data(), vector.size() * sizeof(float), shape, size_t{3},
                                           kFloat, &inputs[0]);
    else
      call<CreateTensorWithDataAsOrtValue>(memory, &token, sizeof token, shape, size_t{2}, kInt64, &inputs[0]);
    for (size_t n = inputs.size() - model.ones.size(); n < inputs.size(); ++n)
      call<CreateTensorWithDataAsOrtValue>(memory, &one, sizeof one, shape, size_t{2}, kInt64, &inputs[n]);
    std::vector<OrtValue*> outputs(output_names.size(), nullptr);
    call<Run>(session, nullptr, input_names.data(), inputs.data(), inputs.size(), output_names.data(),
              output_names.size(), outputs.data());
    void* data;
    call<GetTensorMutableData>(outputs[0], &data);
    const float* values = static_cast<const float*>(data);
    if (model.taken)
      for (size_t n = 0; n < model.given; ++n) std::printf("%.9g%c", values[n], n + 1 < model.given ? ' ' : '\n');
    else
      std::printf("%zu\n", static_cast<size_t>(std::max_element(values, values + model.given) - values));
    release(outputs[0]);
    for (OrtValue* input : inputs) release(input);
    std::copy(outputs.begin() + 1, outputs.end(), inputs.begin() + 1);  // present becomes past
  }
  std::fflush(stdout);
  std::_Exit(0);  // what is left is the process's, and ends with it
}
