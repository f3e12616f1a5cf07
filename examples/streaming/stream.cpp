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
  std::vector<float> first;  // its memory before the first call
  std::vector<int64_t> shape;
};

struct Model {
  std::string input, output;
  size_t taken;  // numbers of a step; 0 for a token
  size_t given;  // numbers of an output: the size of the vocabulary, or of a vector
  std::vector<State> states;
};

[[noreturn]] static void refuse(const std::string& found) { throw std::runtime_error(found); }

// A state of a batch of one.
static State read_state(const Json& entry) {
  State state{entry["past"].text, entry["present"].text, {}, {1}};
  if (entry["dtype"].text != "float32") refuse(state.past + " is not of float32");
  if (entry["grows"].kind != Json::kNull) refuse(state.past + " grows with the tokens");
  const std::vector<Json>& dims = entry["shape"].list;
  int64_t size = 1;
  for (size_t i = 1; i < dims.size(); ++i) {
    const int64_t dim = static_cast<int64_t>(dims[i].number);
    if (dim < 1 || dim > (1 << 24) || (size *= dim) > (1 << 28)) refuse(state.past + " has no usable shape");
    state.shape.push_back(dim);
  }
  state.first.assign(size, static_cast<float>(entry["initial"].number));
  return state;
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
    OrtValue* value;
    call<CreateTensorWithDataAsOrtValue>(memory, state.first.data(), state.first.size() * sizeof(float),
                                         state.shape.data(), state.shape.size(), kFloat, &value);
    inputs.push_back(value);
  }

  const int64_t shape[] = {1, 1, static_cast<int64_t>(model.taken)};
  std::vector<float> vector(model.taken);
  for (int i = 3; model.taken ? read_vector(vector) : i < count; ++i) {
    int64_t token = model.taken ? 0 : std::strtoll(arguments[i], nullptr, 10);
    if (model.taken)
      call<CreateTensorWithDataAsOrtValue>(memory, vector.data(), vector.size() * sizeof(float), shape, size_t{3},
                                           kFloat, &inputs[0]);
    else
      call<CreateTensorWithDataAsOrtValue>(memory, &token, sizeof token, shape, size_t{2}, kInt64, &inputs[0]);
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
