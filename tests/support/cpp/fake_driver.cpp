// A stand-in for the CUDA driver, libcuda.so.1: memory is the host's, and nothing is computed.
//
// Every launch is checked as a driver would, against the kernel's own parameter table (.nv.info in
// its machine code), and written as a line of JSON to the file that FAKE_DRIVER_LOG names, with the
// values of its arguments. FAKE_DRIVER_SM is the compute capability times ten.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace {

struct Function {
    std::string name;
    std::vector<unsigned> sizes;  // of its parameters, in bytes
    int allowed = 48 * 1024;      // dynamic shared memory
};

struct Module {
    std::map<std::string, Function> functions;
};

struct State {
    std::map<char*, size_t> memory;
    std::set<Module*> modules;
    bool capturing = false;
    std::FILE* log = nullptr;

    State() {
        if (char const* name = std::getenv("FAKE_DRIVER_LOG")) log = std::fopen(name, "a");
    }
    ~State() {
        if (!log) return;
        std::fprintf(log, "{\"call\": \"end\", \"allocations\": %zu, \"modules\": %zu}\n", memory.size(),
            modules.size());
        std::fclose(log);
    }
    bool holds(void const* address) const {
        auto after = memory.upper_bound(static_cast<char*>(const_cast<void*>(address)));
        if (after == memory.begin()) return false;
        auto const& [start, size] = *std::prev(after);
        return address < start + size;
    }
} state;

template <typename Number>
Number at(unsigned char const* code, size_t offset) {
    Number found;
    std::memcpy(&found, code + offset, sizeof found);
    return found;
}

// Sizes of the parameters from a section .nv.info.NAME: attribute 0x17 has a parameter's ordinal, its
// offset, and its size in the upper 14 bits of the last word.
std::vector<unsigned> parameters(unsigned char const* data, size_t size) {
    std::map<unsigned, unsigned> found;
    for (size_t place = 0; place + 4 <= size;) {
        unsigned const format = data[place], kind = data[place + 1], length = at<uint16_t>(data, place + 2);
        if (format == 4 && kind == 0x17)
            found[at<uint16_t>(data, place + 8)] = at<uint32_t>(data, place + 12) >> 18;
        place += 4 + (format == 4 ? length : 0);
    }
    std::vector<unsigned> sizes;
    for (auto const& [ordinal, bytes] : found) sizes.push_back(bytes);
    return sizes;
}

bool read(Module& module, unsigned char const* code) {
    if (std::memcmp(code, "\177ELF", 4)) return false;
    size_t const table = at<uint64_t>(code, 0x28), entry = at<uint16_t>(code, 0x3a);
    size_t const count = at<uint16_t>(code, 0x3c), names = at<uint16_t>(code, 0x3e);
    auto const offset = [&](size_t i) { return at<uint64_t>(code, table + i * entry + 24); };
    for (size_t i = 0; i < count; ++i) {
        char const* const name =
            reinterpret_cast<char const*>(code) + offset(names) + at<uint32_t>(code, table + i * entry);
        if (std::strncmp(name, ".nv.info.", 9)) continue;
        size_t const size = at<uint64_t>(code, table + i * entry + 32);
        module.functions[name + 9] = {name + 9, parameters(code + offset(i), size)};
    }
    return !module.functions.empty();
}

char* pointer(CUdeviceptr address) { return reinterpret_cast<char*>(address); }

bool holds(CUdeviceptr address, size_t size) {
    return !size || (state.holds(pointer(address)) && state.holds(pointer(address) + size - 1));
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default"))) CUresult

FAKE cuInit(unsigned) { return CUDA_SUCCESS; }
FAKE cuDriverGetVersion(int* version) {
    *version = 13000;
    return CUDA_SUCCESS;
}
FAKE cuGetErrorName(CUresult, char const** name) {
    *name = "of the stand-in";
    return CUDA_SUCCESS;
}
FAKE cuDeviceGet(CUdevice* device, int) {
    *device = 0;
    return CUDA_SUCCESS;
}
FAKE cuDeviceGetName(char* name, int length, CUdevice) {
    std::snprintf(name, static_cast<size_t>(length), "stand-in for a GPU");
    return CUDA_SUCCESS;
}
FAKE cuDeviceGetAttribute(int* value, CUdevice_attribute kind, CUdevice) {
    char const* const given = std::getenv("FAKE_DRIVER_SM");
    int const sm = given ? std::atoi(given) : 90;
    *value = kind == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? sm / 10
        : kind == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR    ? sm % 10
        : kind == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT        ? 132
                                                                  : 0;
    return CUDA_SUCCESS;
}
FAKE cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
    *context = reinterpret_cast<CUcontext>(&state);
    return CUDA_SUCCESS;
}
FAKE cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
FAKE cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
FAKE cuCtxGetDevice(CUdevice* device) { return cuDeviceGet(device, 0); }

FAKE cuMemAlloc_v2(CUdeviceptr* address, size_t size) {
    void* const made = std::aligned_alloc(256, (size + 255) / 256 * 256);
    if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
    state.memory[static_cast<char*>(made)] = size;
    *address = reinterpret_cast<CUdeviceptr>(made);
    return CUDA_SUCCESS;
}
FAKE cuMemFree_v2(CUdeviceptr address) {
    if (!state.memory.erase(pointer(address))) return CUDA_ERROR_INVALID_VALUE;
    std::free(pointer(address));
    return CUDA_SUCCESS;
}
FAKE cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t size) {
    if (!holds(address, size)) return CUDA_ERROR_INVALID_VALUE;
    std::memset(pointer(address), value, size);
    return CUDA_SUCCESS;
}
FAKE cuMemcpyHtoD_v2(CUdeviceptr to, void const* from, size_t size) {
    if (!holds(to, size)) return CUDA_ERROR_INVALID_VALUE;
    std::memcpy(pointer(to), from, size);
    return CUDA_SUCCESS;
}
FAKE cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t size) {
    if (!holds(from, size)) return CUDA_ERROR_INVALID_VALUE;
    std::memcpy(to, pointer(from), size);
    return CUDA_SUCCESS;
}
FAKE cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size) {
    if (!holds(to, size) || !holds(from, size)) return CUDA_ERROR_INVALID_VALUE;
    std::memmove(pointer(to), pointer(from), size);
    return CUDA_SUCCESS;
}
FAKE cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream) {
    return cuMemcpyDtoD_v2(to, from, size);
}

FAKE cuStreamCreate(CUstream* stream, unsigned) {
    *stream = reinterpret_cast<CUstream>(&state);
    return CUDA_SUCCESS;
}
FAKE cuStreamDestroy_v2(CUstream) { return CUDA_SUCCESS; }
FAKE cuStreamSynchronize(CUstream) { return CUDA_SUCCESS; }
FAKE cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode) {
    state.capturing = true;
    return CUDA_SUCCESS;
}
FAKE cuStreamEndCapture(CUstream, CUgraph* graph) {
    state.capturing = false;
    *graph = reinterpret_cast<CUgraph>(&state);
    return CUDA_SUCCESS;
}
FAKE cuGraphInstantiateWithFlags(CUgraphExec* made, CUgraph, unsigned long long) {
    *made = reinterpret_cast<CUgraphExec>(&state);
    return CUDA_SUCCESS;
}
FAKE cuGraphLaunch(CUgraphExec, CUstream) { return CUDA_SUCCESS; }
FAKE cuGraphExecDestroy(CUgraphExec) { return CUDA_SUCCESS; }
FAKE cuGraphDestroy(CUgraph) { return CUDA_SUCCESS; }
FAKE cuEventCreate(CUevent* event, unsigned) {
    *event = reinterpret_cast<CUevent>(&state);
    return CUDA_SUCCESS;
}
FAKE cuEventRecord(CUevent, CUstream) { return CUDA_SUCCESS; }
FAKE cuEventSynchronize(CUevent) { return CUDA_SUCCESS; }
FAKE cuEventElapsedTime_v2(float* milliseconds, CUevent, CUevent) {
    *milliseconds = 1;
    return CUDA_SUCCESS;
}
FAKE cuEventDestroy_v2(CUevent) { return CUDA_SUCCESS; }

FAKE cuModuleLoadData(CUmodule* module, void const* code) {
    // Loading waits for the device: it must not happen while a stream is captured.
    if (state.capturing) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    auto made = std::make_unique<Module>();
    if (!read(*made, static_cast<unsigned char const*>(code))) return CUDA_ERROR_INVALID_IMAGE;
    state.modules.insert(made.get());
    *module = reinterpret_cast<CUmodule>(made.release());
    return CUDA_SUCCESS;
}
FAKE cuModuleUnload(CUmodule module) {
    Module* const found = reinterpret_cast<Module*>(module);
    if (!state.modules.erase(found)) return CUDA_ERROR_INVALID_HANDLE;
    delete found;
    return CUDA_SUCCESS;
}
FAKE cuModuleGetFunction(CUfunction* function, CUmodule module, char const* name) {
    auto& known = reinterpret_cast<Module*>(module)->functions;
    auto const found = known.find(name);
    if (found == known.end()) return CUDA_ERROR_NOT_FOUND;
    *function = reinterpret_cast<CUfunction>(&found->second);
    return CUDA_SUCCESS;
}
FAKE cuFuncSetAttribute(CUfunction function, CUfunction_attribute kind, int value) {
    if (kind == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
        reinterpret_cast<Function*>(function)->allowed = value;
    return CUDA_SUCCESS;
}

FAKE cuLaunchKernel(CUfunction handle, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned,
    unsigned, unsigned shared, CUstream, void** values, void**) {
    Function const& function = *reinterpret_cast<Function*>(handle);
    if (!x || !y || !z || y > 65535 || z > 65535 || threads > 1024) return CUDA_ERROR_INVALID_VALUE;
    if (static_cast<int>(shared) > function.allowed) return CUDA_ERROR_INVALID_VALUE;
    std::string arguments;
    for (size_t i = 0; i < function.sizes.size(); ++i) {
        long long value = 0;
        std::memcpy(&value, values[i], function.sizes[i]);
        // A pointer is null, or in memory that there is.
        if (function.sizes[i] == 8 && value && !state.holds(reinterpret_cast<void*>(value)))
            return CUDA_ERROR_ILLEGAL_ADDRESS;
        arguments += (i ? ", " : "") + std::to_string(value);
    }
    if (state.log)
        std::fprintf(state.log,
            "{\"call\": \"launch\", \"entry\": \"%s\", \"grid\": [%u, %u, %u], \"threads\": %u, "
            "\"shared\": %u, \"captured\": %s, \"arguments\": [%s]}\n",
            function.name.c_str(), x, y, z, threads, shared, state.capturing ? "true" : "false",
            arguments.c_str());
    return CUDA_SUCCESS;
}

// How cuda-bindings finds all others: the newest form of a name that there is here.
FAKE cuGetProcAddress_v2(
    char const* name, void** found, int, cuuint64_t, CUdriverProcAddressQueryResult* status) {
    Dl_info here;
    dladdr(reinterpret_cast<void*>(&cuInit), &here);
    void* const library = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *found = nullptr;
    for (std::string const form : {"_v2", ""})
        if (!*found) *found = dlsym(library, (name + form).c_str());
    // cuGraphInstantiate has had another name since CUDA 12.
    if (!*found && !std::strcmp(name, "cuGraphInstantiate")) *found = reinterpret_cast<void*>(&cuGraphInstantiateWithFlags);
    if (status) *status = *found ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
