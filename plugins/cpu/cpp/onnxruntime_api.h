// The entries of ONNX Runtime's C interface that our libraries call, and the table they hand over.
//
// ONNX Runtime's own header comes with its release archives only, on no package registry. Its table
// of functions, OrtApi, only ever grows at the end, so entries are called by their place in it;
// OrtCustomOp carries the version it was filled for. Both are checked when the library is registered.
#pragma once

#include <cstddef>
#include <cstdint>

struct OrtAllocator;
struct OrtCustomOp;
struct OrtCustomOpDomain;
struct OrtKernelContext;
struct OrtKernelInfo;
struct OrtMemoryInfo;
struct OrtSessionOptions;
struct OrtStatus;
struct OrtTensorTypeAndShapeInfo;
struct OrtTypeInfo;
struct OrtValue;

using OrtApi = void* const*;

struct OrtApiBase {
  OrtApi (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

namespace linexport {

constexpr uint32_t kApiVersion = 18;  // the first with OrtCustomOp's in-place map

constexpr int kUndefined = 0, kFloat = 1, kUint8 = 2, kInt64 = 7, kBool = 9, kFloat16 = 10, kBFloat16 = 16;  // types of elements
constexpr int kActivation = -1;  // of what an operator declares: float, float16 or bfloat16, the same for all
constexpr int kStored = -2;      // of the same type, and left as it is: weights of which a call reads a part
constexpr int kRequired = 0, kOptional = 1;
constexpr int kFail = 1, kInvalidArgument = 2;

template <int Place>
struct Entry;
#define ENTRY(name, place, result, ...)   \
  constexpr int name = place;             \
  template <>                             \
  struct Entry<place> {                   \
    using Type = result (*)(__VA_ARGS__); \
  };
ENTRY(CreateStatus, 0, OrtStatus*, int code, const char* message)
ENTRY(GetErrorMessage, 2, const char*, const OrtStatus*)
ENTRY(CreateCustomOpDomain, 26, OrtStatus*, const char* domain, OrtCustomOpDomain** out)
ENTRY(CustomOpDomainAdd, 27, OrtStatus*, OrtCustomOpDomain*, const OrtCustomOp*)
ENTRY(AddCustomOpDomain, 28, OrtStatus*, OrtSessionOptions*, OrtCustomOpDomain*)
ENTRY(GetTensorMutableData, 51, OrtStatus*, OrtValue*, void** out)
ENTRY(GetTensorElementType, 60, OrtStatus*, const OrtTensorTypeAndShapeInfo*, int* out)
ENTRY(GetDimensionsCount, 61, OrtStatus*, const OrtTensorTypeAndShapeInfo*, size_t* out)
ENTRY(GetDimensions, 62, OrtStatus*, const OrtTensorTypeAndShapeInfo*, int64_t* values, size_t count)
ENTRY(GetTensorTypeAndShape, 65, OrtStatus*, const OrtValue*, OrtTensorTypeAndShapeInfo** out)
ENTRY(AllocatorAlloc, 75, OrtStatus*, OrtAllocator*, size_t bytes, void** out)
ENTRY(AllocatorFree, 76, OrtStatus*, OrtAllocator*, void*)
ENTRY(AllocatorGetInfo, 77, OrtStatus*, const OrtAllocator*, const OrtMemoryInfo** out)
ENTRY(KernelInfoGetAttributeFloat, 85, OrtStatus*, const OrtKernelInfo*, const char* name, float* out)
ENTRY(KernelInfoGetAttributeInt64, 86, OrtStatus*, const OrtKernelInfo*, const char* name, int64_t* out)
ENTRY(KernelInfoGetAttributeString, 87, OrtStatus*, const OrtKernelInfo*, const char* name, char* out, size_t* size)
ENTRY(KernelContextGetInputCount, 88, OrtStatus*, const OrtKernelContext*, size_t* out)
ENTRY(KernelContextGetOutputCount, 89, OrtStatus*, const OrtKernelContext*, size_t* out)
ENTRY(KernelContextGetInput, 90, OrtStatus*, const OrtKernelContext*, size_t index, const OrtValue** out)
ENTRY(KernelContextGetOutput, 91, OrtStatus*, OrtKernelContext*, size_t index, const int64_t* dims, size_t rank,
      OrtValue** out)
ENTRY(ReleaseStatus, 93, void, OrtStatus*)
ENTRY(ReleaseTensorTypeAndShapeInfo, 99, void, OrtTensorTypeAndShapeInfo*)
ENTRY(ReleaseAllocator, 132, void, OrtAllocator*)
ENTRY(KernelInfoGetAttributeInt64Array, 163, OrtStatus*, const OrtKernelInfo*, const char* name, int64_t* out,
      size_t* size)
ENTRY(KernelContextGetGPUComputeStream, 193, OrtStatus*, const OrtKernelContext*, void** out)
ENTRY(GetSessionConfigEntry, 238, OrtStatus*, const OrtSessionOptions*, const char* key, char* value, size_t* size)
ENTRY(KernelContextParallelFor, 274, OrtStatus*, const OrtKernelContext*, void (*work)(void* data, size_t index),
      size_t total, size_t batches, void* data)
ENTRY(KernelContextGetScratchBuffer, 277, OrtStatus*, const OrtKernelContext*, const OrtMemoryInfo*, size_t bytes,
      void** out)
ENTRY(KernelInfoGetAllocator, 278, OrtStatus*, const OrtKernelInfo*, int kind, OrtAllocator** out)
#undef ENTRY

}  // namespace linexport

// What one operator tells ONNX Runtime of itself; the fields of interface version 18, in order.
struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, OrtApi, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  int (*GetInputType)(const OrtCustomOp*, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int (*GetOutputType)(const OrtCustomOp*, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void* kernel, OrtKernelContext*);
  void (*KernelDestroy)(void* kernel);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t index);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t index);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, OrtApi, const OrtKernelInfo*, void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*);
  OrtStatus* (*InferOutputShape)(const OrtCustomOp*, void* context);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  size_t (*GetMayInplace)(int** inputs, int** outputs);
  void (*ReleaseMayInplace)(int* inputs, int* outputs);
  size_t (*GetAliasMap)(int** inputs, int** outputs);
  void (*ReleaseAliasMap)(int* inputs, int* outputs);
};
