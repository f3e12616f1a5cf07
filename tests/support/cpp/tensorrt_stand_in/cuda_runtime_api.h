// A stand-in for the CUDA runtime: memory is the host's.
#pragma once
#include <cstdlib>
#include <cstring>

using cudaStream_t = int;
enum cudaError_t { cudaSuccess };
enum cudaMemcpyKind { cudaMemcpyHostToDevice };

inline cudaError_t cudaMalloc(void** address, size_t size) { return *address = std::malloc(size), cudaSuccess; }
inline cudaError_t cudaMemset(void* address, int value, size_t size) {
    return std::memset(address, value, size), cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, void const* from, size_t size, cudaMemcpyKind) {
    return std::memcpy(to, from, size), cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) { return *stream = 1, cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
