// ONNX Runtime's part of a call of the CPU library: values, attributes, and threads of its own.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

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

}  // namespace
