// A stand-in for the CUDA runtime: memory is the host's, and its sizes are known.
#pragma once
#include <cstdlib>
#include <cstring>
#include <map>

using cudaStream_t = int;
enum cudaError_t { cudaSuccess };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };

inline std::map<void*, size_t>& cudaStandInSizes() {
    static std::map<void*, size_t> sizes;
    return sizes;
}
inline cudaError_t cudaMalloc(void** address, size_t size) {
    *address = std::malloc(size);
    return cudaStandInSizes()[*address] = size, cudaSuccess;
}
inline cudaError_t cudaMemset(void* address, int value, size_t size) {
    return std::memset(address, value, size), cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, void const* from, size_t size, cudaMemcpyKind) {
    return std::memcpy(to, from, size), cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) { return *stream = 1, cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
