// The few entries of ONNX Runtime's C interface that stream.cpp calls.
//
// ONNX Runtime's own header, onnxruntime_c_api.h, comes with its release archives but not with its
// Python package. Its table of functions, OrtApi, only ever grows at the end, so that entries can
// be called by their place in it; GetApi(17) asks for a table that has at least those of version 1.17.
// With the official header at hand, use that instead.
#pragma once

#include <cstddef>
#include <cstdint>

struct OrtStatus;
struct OrtEnv;
struct OrtSessionOptions;
struct OrtSession;
struct OrtRunOptions;
struct OrtValue;
struct OrtMemoryInfo;

struct OrtApiBase {
  const void* const* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

constexpr uint32_t kApiVersion = 17;
constexpr int kWarning = 2;           // OrtLoggingLevel
constexpr int kFloat = 1, kInt64 = 7;  // ONNXTensorElementDataType
constexpr int kArena = 1, kDefault = 0;  // OrtAllocatorType, OrtMemType

// Function types by their place in OrtApi. A null status is success.
template <int Place>
struct Entry;
#define ENTRY(place, result, ...) \
  template <>                     \
  struct Entry<place> {           \
    using Type = result (*)(__VA_ARGS__); \
  };

enum {
  GetErrorMessage = 2,
  CreateEnv = 3,
  CreateSession = 7,
  Run = 9,
  CreateSessionOptions = 10,
  CreateTensorWithDataAsOrtValue = 49,
  GetTensorMutableData = 51,
  CreateCpuMemoryInfo = 69,
  ReleaseValue = 96,
  RegisterCustomOpsLibrary = 228,  // the second version of it, RegisterCustomOpsLibrary_V2
};
ENTRY(GetErrorMessage, const char*, const OrtStatus*)
ENTRY(CreateEnv, OrtStatus*, int level, const char* name, OrtEnv** out)
ENTRY(CreateSession, OrtStatus*, const OrtEnv*, const char* path, const OrtSessionOptions*, OrtSession** out)
ENTRY(Run, OrtStatus*, OrtSession*, const OrtRunOptions*, const char* const* input_names, const OrtValue* const* inputs,
      size_t input_count, const char* const* output_names, size_t output_count, OrtValue** outputs)
ENTRY(CreateSessionOptions, OrtStatus*, OrtSessionOptions** out)
ENTRY(CreateTensorWithDataAsOrtValue, OrtStatus*, const OrtMemoryInfo*, void* data, size_t bytes, const int64_t* shape,
      size_t rank, int type, OrtValue** out)
ENTRY(GetTensorMutableData, OrtStatus*, OrtValue*, void** out)
ENTRY(CreateCpuMemoryInfo, OrtStatus*, int allocator, int memory, OrtMemoryInfo** out)
ENTRY(ReleaseValue, void, OrtValue*)
ENTRY(RegisterCustomOpsLibrary, OrtStatus*, OrtSessionOptions*, const char* path)
#undef ENTRY
