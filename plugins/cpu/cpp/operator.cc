// Operators as ONNX Runtime's custom operators; an Error becomes a status.
#include "operator.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <new>

#include "half.h"
#include "library.h"
#include "onnxruntime_call.h"

namespace linexport {
namespace {

template <class F>
OrtStatus* guarded(OrtApi api, const F& work) {
  try {
    work();
    return nullptr;
  } catch (const Error& error) {
    return call<CreateStatus>(api, int{kInvalidArgument}, error.what());
  } catch (const std::bad_alloc&) {
    return call<CreateStatus>(api, int{kFail}, "Failed to allocate memory");
  } catch (const std::exception& error) {
    return call<CreateStatus>(api, int{kFail}, error.what());
  }
}

struct Opened {
  OrtApi api;
  const CustomOp* op;
  std::unique_ptr<Kernel> kernel;
};

// The parts of a call on threads of ONNX Runtime's, through which no exception may leave. The first one is thrown again
// where the call was made, and parts that have not begun are left out.
struct Parts {
  const Work<size_t>& work;
  std::atomic<bool> failed{false};
  std::exception_ptr error = nullptr;

  void run(size_t index) noexcept {
    if (failed) return;
    try {
      work(index);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  }
};

constexpr long kMostThreads = 1 << 10;
constexpr int64_t kMostHeads = 1 << 16;
constexpr int64_t kConverted = 1 << 15;  // numbers that one part of a conversion has

const Declaration& of(const OrtCustomOp* op) { return *static_cast<const CustomOp*>(op)->declaration; }

int type_of(const OrtCustomOp* op, const Argument& argument) {
  return argument.type == kActivation || argument.type == kStored ? static_cast<const CustomOp*>(op)->activation : argument.type;
}

OrtStatus* create(const OrtCustomOp* op, OrtApi api, const OrtKernelInfo* info, void** out) {
  return guarded(api, [&] {
    Attributes attributes(api, info, static_cast<const CustomOp*>(op)->threads);
    if (attributes.lists("absent_inputs")) throw Error("absent_inputs is of nodes prepared for TensorRT");
    *out = new Opened{api, static_cast<const CustomOp*>(op), of(op).create(attributes)};
  });
}

OrtStatus* compute(void* opened, OrtKernelContext* context) {
  const Opened& own = *static_cast<Opened*>(opened);
  return guarded(own.api, [&] {
    Context call(own.api, context, *own.op->declaration, own.op->activation);
    own.kernel->compute(call);
    call.finish();
  });
}

}  // namespace

int64_t Attributes::integer(const char* name, int64_t otherwise) const {
  int64_t value;
  return found<KernelInfoGetAttributeInt64>(api_, info_, (prefix_ + name).c_str(), &value) ? value : otherwise;
}

int64_t Attributes::heads(const char* name) const {
  const int64_t found = integer(name, 0);
  return found < 0 || found > kMostHeads ? 0 : found;
}

float Attributes::number(const char* name, float otherwise) const {
  float value;
  return found<KernelInfoGetAttributeFloat>(api_, info_, (prefix_ + name).c_str(), &value) ? value : otherwise;
}

std::string Attributes::text(const char* name, const char* otherwise) const {
  const std::string whole = prefix_ + name;
  size_t size = 0;  // with the closing zero
  char* nothing = nullptr;
  if (!found<KernelInfoGetAttributeString>(api_, info_, whole.c_str(), nothing, &size) || size == 0) return otherwise;
  std::string value(size, '\0');
  checked<KernelInfoGetAttributeString>(api_, info_, whole.c_str(), &value[0], &size);
  value.resize(size - 1);
  return value;
}

bool Attributes::lists(const char* name) const {
  size_t size = 0;
  return found<KernelInfoGetAttributeInt64Array>(api_, info_, (prefix_ + name).c_str(), static_cast<int64_t*>(nullptr), &size) && size > 0;
}

Context::Context(OrtApi api, OrtKernelContext* context, const Declaration& declaration, int activation)
    : api_(api), context_(context), declaration_(declaration), activation_(activation) {
  checked<KernelContextGetInputCount>(api, context, &inputs_);
  checked<KernelContextGetOutputCount>(api, context, &outputs_);
}

Tensor Context::input(size_t place) const {
  Tensor tensor;
  const OrtValue* value = nullptr;
  if (place < inputs_) checked<KernelContextGetInput>(api_, context_, place, &value);
  if (!value) return tensor;
  OrtTensorTypeAndShapeInfo* info;
  checked<GetTensorTypeAndShape>(api_, value, &info);
  size_t rank = 0;
  bool read = found<GetTensorElementType>(api_, info, &tensor.type) && found<GetDimensionsCount>(api_, info, &rank) && rank <= Tensor::kMaxRank &&
              found<GetDimensions>(api_, info, tensor.dims, rank);
  call<ReleaseTensorTypeAndShapeInfo>(api_, info);
  if (!read) throw Error("an input has more than 8 dimensions");
  tensor.rank = static_cast<int>(rank);
  checked<GetTensorMutableData>(api_, const_cast<OrtValue*>(value), &tensor.data);
  tensor.present = true;
  if (activation_ != kFloat && declaration_.inputs[place].type == kActivation) {
    const auto* from = static_cast<const uint16_t*>(tensor.data);
    float* to = kept(place, tensor.count());
    convert(tensor.count(), [&](int64_t start, int64_t end) { widen(activation_, from + start, to + start, end - start); });
    tensor.data = to;
  }
  return tensor;
}

Tensor Context::output(size_t place, const int64_t* dims, size_t rank) {
  Tensor tensor;
  OrtValue* value = nullptr;
  if (place < outputs_) checked<KernelContextGetOutput>(api_, context_, place, dims, rank, &value);
  if (!value) return tensor;
  checked<GetTensorMutableData>(api_, value, &tensor.data);
  std::copy(dims, dims + rank, tensor.dims);
  tensor.rank = static_cast<int>(rank);
  tensor.present = true;
  if (activation_ != kFloat && declaration_.outputs[place].type == kActivation) {
    float* from = kept(kMostTensors + place, tensor.count());
    narrowed_[place] = {static_cast<uint16_t*>(tensor.data), from, tensor.count()};
    tensor.data = from;
  }
  return tensor;
}

void Context::finish() const {
  for (const Narrowed& output : narrowed_)
    if (output.to) convert(output.count, [&](int64_t start, int64_t end) {
        narrow(activation_, output.from + start, output.to + start, end - start);
      });
}

float* Context::kept(size_t place, int64_t floats) {
  static thread_local std::vector<float> all[2 * kMostTensors];
  std::vector<float>& own = all[place];
  if (static_cast<int64_t>(own.size()) < floats + 1) own.resize(floats + 1);
  return own.data();
}

void Context::convert(int64_t count, const Work<int64_t, int64_t>& part) const {
  const int64_t parts = (count + kConverted - 1) / kConverted;
  if (parts == 0) return;
  parallel(parts, [&](size_t index) {
    const int64_t start = static_cast<int64_t>(index) * kConverted;
    part(start, std::min(start + kConverted, count));
  });
}

void Context::parallel(size_t count, const Work<size_t>& work) const {
  if (count == 1) return work(0);
  Parts parts{work};
  void (*entry)(void*, size_t) = [](void* data, size_t index) { static_cast<Parts*>(data)->run(index); };
  checked<KernelContextParallelFor>(api_, context_, entry, count, size_t{0}, static_cast<void*>(&parts));
  if (parts.error) std::rethrow_exception(parts.error);
}

std::vector<Declaration>& declarations() {
  static std::vector<Declaration> all;
  return all;
}

Registered::Registered(Declaration declaration) { declarations().push_back(std::move(declaration)); }

CustomOp::CustomOp(const Declaration* declaration, int activation, int threads)
    : OrtCustomOp{}, declaration(declaration), activation(activation), threads(threads) {
  version = kApiVersion;
  GetName = [](const OrtCustomOp* op) { return of(op).name; };
  GetExecutionProviderType = [](const OrtCustomOp*) { return "CPUExecutionProvider"; };
  GetInputType = [](const OrtCustomOp* op, size_t i) { return type_of(op, of(op).inputs[i]); };
  GetInputTypeCount = [](const OrtCustomOp* op) { return of(op).inputs.size(); };
  GetOutputType = [](const OrtCustomOp* op, size_t i) { return type_of(op, of(op).outputs[i]); };
  GetOutputTypeCount = [](const OrtCustomOp* op) { return of(op).outputs.size(); };
  GetInputCharacteristic = [](const OrtCustomOp* op, size_t i) {
    return of(op).inputs[i].optional ? kOptional : kRequired;
  };
  GetOutputCharacteristic = [](const OrtCustomOp* op, size_t i) {
    return of(op).outputs[i].optional ? kOptional : kRequired;
  };
  GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };
  GetStartVersion = [](const OrtCustomOp*) { return 1; };
  GetEndVersion = [](const OrtCustomOp*) { return 1; };
  CreateKernelV2 = create;
  KernelComputeV2 = compute;
  KernelDestroy = [](void* opened) { delete static_cast<Opened*>(opened); };
}

OrtCustomOpDomain* new_domain(OrtApi api, const char* name, int threads) {
  OrtCustomOpDomain* domain = nullptr;
  checked<CreateCustomOpDomain>(api, name, &domain);
  for (const Declaration& declaration : declarations())
    for (int activation : {kFloat, kFloat16, kBFloat16}) {
      if (declaration.domain != name || (activation != kFloat && !declaration.has_activations())) continue;
      const OrtCustomOp* op = new CustomOp(&declaration, activation, threads);
      checked<CustomOpDomainAdd>(api, domain, op);
    }
  return domain;
}

void add_domain(OrtApi api, OrtSessionOptions* options, OrtCustomOpDomain* domain) {
  checked<AddCustomOpDomain>(api, options, domain);
}

int session_threads(OrtApi api, const OrtSessionOptions* options, int otherwise) {
  char value[16];
  size_t size = sizeof value;
  if (!found<GetSessionConfigEntry>(api, options, "linexport.threads", value, &size)) return otherwise;
  const long threads = std::strtol(value, nullptr, 10);
  return threads > 0 ? static_cast<int>(std::min(threads, kMostThreads)) : otherwise;
}

}  // namespace linexport
