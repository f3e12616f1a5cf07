// An operator of the library: what its file declares, and what its kernel sees of a call.
//
//   class Twice : public Kernel { void compute(Context& call) const override; };
//   static const Registered twice({"Twice", {{"x", kFloat}}, {{"y", kFloat}}, make<Twice>});
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "onnxruntime_api.h"

namespace linexport {

constexpr size_t kMostTensors = 24;  // inputs of an operator, and outputs

// Ends the call, or the opening of the session, with a sentence.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The attributes of a node; a name it lacks has the given default.
class Attributes {
 public:
  Attributes(OrtApi api, const OrtKernelInfo* info, int threads, std::string prefix = "")
      : threads(threads), api_(api), info_(info), prefix_(std::move(prefix)) {}
  // Those whose names begin with the prefix, by the rest of their names.
  Attributes part(std::string prefix) const { return {api_, info_, threads, std::move(prefix)}; }
  int64_t integer(const char* name, int64_t otherwise) const;
  // A number of heads, 0 where the node lacks it or has one that no model has: sizes times it are then not too large.
  int64_t heads(const char* name) const;
  float number(const char* name, float otherwise) const;
  std::string text(const char* name, const char* otherwise) const;
  // Whether the node has the list of integers, with an element in it.
  bool lists(const char* name) const;

  // How many threads the session's pool is taken to have.
  const int threads;

 private:
  OrtApi api_;
  const OrtKernelInfo* info_;
  const std::string prefix_;
};

// An input or output; without data where the node has none in that place.
struct Tensor {
  static constexpr int kMaxRank = 8;
  void* data = nullptr;
  bool present = false;
  int type = 0, rank = 0;
  int64_t dims[kMaxRank] = {};

  explicit operator bool() const { return present; }
  int64_t count() const {
    int64_t product = 1;
    for (int i = 0; i < rank; ++i) product *= dims[i];
    return product;
  }
  bool has_shape(std::initializer_list<int64_t> shape) const {
    return rank == static_cast<int>(shape.size()) && std::equal(shape.begin(), shape.end(), dims);
  }
  template <class T>
  const T* in() const {
    return static_cast<const T*>(data);
  }
  template <class T>
  T* out() const {
    return static_cast<T*>(data);
  }
};

struct Declaration;

// What is called with these arguments, while it lives: std::function without memory of its own.
template <class... Arguments>
class Work {
 public:
  template <class F>
  Work(const F& f) : f_(&f), call_([](const void* f, Arguments... given) { (*static_cast<const F*>(f))(given...); }) {}
  void operator()(Arguments... given) const { call_(f_, given...); }

 private:
  const void* f_;
  void (*call_)(const void*, Arguments...);
};

// One call of a kernel. Activations of 16 bits are float32 for it: converted when they are asked for, and outputs when
// the call ends.
class Context {
 public:
  Context(OrtApi api, OrtKernelContext* context, const Declaration& declaration, int activation);
  virtual ~Context() = default;
  virtual Tensor input(size_t place) const;
  Tensor output(size_t place, std::initializer_list<int64_t> dims) { return output(place, dims.begin(), dims.size()); }
  virtual Tensor output(size_t place, const int64_t* dims, size_t rank);
  void finish() const;
  // Call work(0) ... work(count - 1) on the threads of the session.
  void parallel(size_t count, const Work<size_t>& work) const;

 private:
  struct Narrowed {
    uint16_t* to = nullptr;
    const float* from;
    int64_t count;
  };
  // Memory of this thread, kept from call to call.
  static float* kept(size_t place, int64_t floats);
  void convert(int64_t count, const Work<int64_t, int64_t>& part) const;

  OrtApi api_;
  OrtKernelContext* context_;
  const Declaration& declaration_;
  const int activation_;
  size_t inputs_ = 0, outputs_ = 0;
  Narrowed narrowed_[kMostTensors];
};

class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual void compute(Context& call) const = 0;
};

struct Argument {
  const char* name;
  int type;
  bool optional = false;
};

inline constexpr char kDomain[] = "linexport";           // of ops that models are made of
inline constexpr char kFusedDomain[] = "linexport.cpu";  // of what was made of several nodes for this library

struct Declaration {
  const char* name;
  std::vector<Argument> inputs, outputs;
  std::unique_ptr<Kernel> (*create)(const Attributes&);
  const char* domain = kDomain;

  bool has_activations() const {
    for (const Argument& input : inputs)
      if (input.type == kActivation) return true;
    return false;
  }
};

template <class K>
std::unique_ptr<Kernel> make(const Attributes& attributes) {
  return std::make_unique<K>(attributes);
}

// A static object of this class makes an operator part of the library.
struct Registered {
  explicit Registered(Declaration declaration);
};

std::vector<Declaration>& declarations();

}  // namespace linexport
