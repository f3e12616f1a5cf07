// A stand-in for the CUDA driver, libcuda.so.1: memory is the host's, and kernels compute nothing.
//
// Every launch is checked as a driver would, against the kernel's own parameter table (.nv.info in
// its machine code). Copies, fills and host functions are done at once, or when the graph is launched
// that they are captured into. Every call that allocates, frees, copies or launches is written as a
// line of JSON to the file that FAKE_DRIVER_LOG names. FAKE_DRIVER_SM is the compute capability times
// ten, FAKE_DRIVER_MULTIPROCESSORS and FAKE_DRIVER_DEVICES are counts. With FAKE_DRIVER_OTHERS_MEMORY, kernels
// may be given memory that was not allocated here.
#include "fake_driver.h"

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
FAKE cuDeviceGetCount(int* count) {
    *count = setting("FAKE_DRIVER_DEVICES", 1);
    return CUDA_SUCCESS;
}
FAKE cuDeviceGet(CUdevice* device, int ordinal) {
    if (ordinal < 0 || ordinal >= setting("FAKE_DRIVER_DEVICES", 1)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}
FAKE cuDeviceGetName(char* name, int length, CUdevice) {
    std::snprintf(name, static_cast<size_t>(length), "stand-in for a GPU");
    return CUDA_SUCCESS;
}
FAKE cuDeviceGetAttribute(int* value, CUdevice_attribute kind, CUdevice) {
    int const sm = setting("FAKE_DRIVER_SM", 90);
    *value = kind == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? sm / 10
        : kind == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR    ? sm % 10
        : kind == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT        ? setting("FAKE_DRIVER_MULTIPROCESSORS", 132)
                                                                  : 0;
    return CUDA_SUCCESS;
}
FAKE cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    LOCKED;
    Context& found = state.contexts[device];
    found.device = device;
    ++found.retained;
    *context = reinterpret_cast<CUcontext>(&found);
    return CUDA_SUCCESS;
}
FAKE cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    LOCKED;
    return state.contexts[device].retained-- > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
FAKE cuCtxSetCurrent(CUcontext context) {
    current = reinterpret_cast<Context*>(context);
    return CUDA_SUCCESS;
}
FAKE cuCtxGetCurrent(CUcontext* context) {
    *context = reinterpret_cast<CUcontext>(current);
    return CUDA_SUCCESS;
}
FAKE cuCtxGetDevice(CUdevice* device) {
    if (!current) return CUDA_ERROR_INVALID_CONTEXT;
    *device = current->device;
    return CUDA_SUCCESS;
}

FAKE cuMemAlloc_v2(CUdeviceptr* address, size_t size) {
    APART;
    if (!size) return CUDA_ERROR_INVALID_VALUE;
    void* const made = std::aligned_alloc(256, (size + 255) / 256 * 256);
    if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
    std::memset(made, 0xff, size);  // NaN, until something is written there
    state.memory[static_cast<char*>(made)] = size;
    *address = reinterpret_cast<CUdeviceptr>(made);
    state.say("\"call\": \"alloc\", \"address\": %llu, \"size\": %zu, \"device\": %d", *address, size,
        current->device);
    return CUDA_SUCCESS;
}
FAKE cuMemFree_v2(CUdeviceptr address) {
    APART;
    if (!state.memory.erase(pointer(address))) return CUDA_ERROR_INVALID_VALUE;
    state.say("\"call\": \"free\", \"address\": %llu", address);
    std::free(pointer(address));
    return CUDA_SUCCESS;
}
FAKE cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t size) {
    APART;
    if (!holds(address, size)) return CUDA_ERROR_INVALID_VALUE;
    std::memset(pointer(address), value, size);
    return CUDA_SUCCESS;
}
FAKE cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t size, CUstream stream) {
    LOCKED;
    if (!holds(address, size)) return CUDA_ERROR_INVALID_VALUE;
    state.say("\"call\": \"fill\", \"size\": %zu", size);
    return put(stream, [=] { std::memset(pointer(address), value, size); });
}

namespace {

CUresult copy(char const* kind, void* to, void const* from, size_t size, CUstream stream) {
    LOCKED;
    bool const reads = std::strcmp(kind, "HtoD"), writes = std::strcmp(kind, "DtoH");
    if (reads && !holds(reinterpret_cast<CUdeviceptr>(from), size)) return CUDA_ERROR_INVALID_VALUE;
    if (writes && !holds(reinterpret_cast<CUdeviceptr>(to), size)) return CUDA_ERROR_INVALID_VALUE;
    state.say("\"call\": \"copy\", \"kind\": \"%s\", \"size\": %zu, \"to\": %llu, \"from\": %llu", kind, size,
        reinterpret_cast<unsigned long long>(to), reinterpret_cast<unsigned long long>(from));
    auto const work = [=] { std::memmove(to, from, size); };
    if (stream) return put(stream, work);
    if (CUresult const wrong = apart(); wrong != CUDA_SUCCESS) return wrong;
    work();
    return CUDA_SUCCESS;
}

}  // namespace

FAKE cuMemcpyHtoD_v2(CUdeviceptr to, void const* from, size_t size) {
    return copy("HtoD", pointer(to), from, size, nullptr);
}
FAKE cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t size) {
    return copy("DtoH", to, pointer(from), size, nullptr);
}
FAKE cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size) {
    return copy("DtoD", pointer(to), pointer(from), size, nullptr);
}
FAKE cuMemcpyHtoDAsync_v2(CUdeviceptr to, void const* from, size_t size, CUstream stream) {
    return copy("HtoD", pointer(to), from, size, stream);
}
FAKE cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t size, CUstream stream) {
    return copy("DtoH", to, pointer(from), size, stream);
}
FAKE cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    return copy("DtoD", pointer(to), pointer(from), size, stream);
}

FAKE cuStreamCreate(CUstream* stream, unsigned) {
    APART;
    auto* const made = new Stream;
    state.streams.insert(made);
    *stream = reinterpret_cast<CUstream>(made);
    return CUDA_SUCCESS;
}
FAKE cuStreamDestroy_v2(CUstream stream) {
    APART;
    if (!state.streams.erase(reinterpret_cast<Stream*>(stream))) return CUDA_ERROR_INVALID_HANDLE;
    delete reinterpret_cast<Stream*>(stream);
    return CUDA_SUCCESS;
}
FAKE cuStreamSynchronize(CUstream) {
    APART;
    return CUDA_SUCCESS;
}
FAKE cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode) {
    APART;
    ++state.captures;
    reinterpret_cast<Stream*>(stream)->capturing = new Graph;
    state.say("\"call\": \"capture\"");
    return CUDA_SUCCESS;
}
FAKE cuStreamEndCapture(CUstream stream, CUgraph* graph) {
    LOCKED;
    Graph*& captured = reinterpret_cast<Stream*>(stream)->capturing;
    if (!captured) return CUDA_ERROR_ILLEGAL_STATE;
    --state.captures;
    state.graphs.insert(captured);
    *graph = reinterpret_cast<CUgraph>(captured);
    captured = nullptr;
    return CUDA_SUCCESS;
}
FAKE cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
    bool const captured = reinterpret_cast<Stream*>(stream)->capturing;
    *status = captured ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}
FAKE cuGraphInstantiateWithFlags(CUgraphExec* made, CUgraph graph, unsigned long long) {
    APART;
    auto* const ready = new Graph(*reinterpret_cast<Graph*>(graph));
    state.executables.insert(ready);
    *made = reinterpret_cast<CUgraphExec>(ready);
    return CUDA_SUCCESS;
}
FAKE cuGraphLaunch(CUgraphExec executable, CUstream stream) {
    LOCKED;
    Graph* const graph = reinterpret_cast<Graph*>(executable);
    if (!state.executables.count(graph)) return CUDA_ERROR_INVALID_HANDLE;
    state.say("\"call\": \"replay\", \"nodes\": %zu", graph->nodes.size());
    return put(stream, [nodes = graph->nodes] {
        for (Work const& work : nodes) work();
    });
}
FAKE cuGraphExecDestroy(CUgraphExec executable) {
    APART;
    if (!state.executables.erase(reinterpret_cast<Graph*>(executable))) return CUDA_ERROR_INVALID_HANDLE;
    delete reinterpret_cast<Graph*>(executable);
    return CUDA_SUCCESS;
}
FAKE cuGraphDestroy(CUgraph graph) {
    APART;
    if (!state.graphs.erase(reinterpret_cast<Graph*>(graph))) return CUDA_ERROR_INVALID_HANDLE;
    delete reinterpret_cast<Graph*>(graph);
    return CUDA_SUCCESS;
}
FAKE cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
    LOCKED;
    return put(stream, [=] { function(data); });
}
FAKE cuEventCreate(CUevent* event, unsigned) {
    APART;
    auto* const made = new int;
    state.events.insert(made);
    *event = reinterpret_cast<CUevent>(made);
    return CUDA_SUCCESS;
}
FAKE cuEventRecord(CUevent, CUstream) { return CUDA_SUCCESS; }
FAKE cuEventSynchronize(CUevent) { return CUDA_SUCCESS; }
FAKE cuEventElapsedTime_v2(float* milliseconds, CUevent, CUevent) {
    *milliseconds = 1;
    return CUDA_SUCCESS;
}
FAKE cuEventDestroy_v2(CUevent event) {
    LOCKED;
    if (!state.events.erase(reinterpret_cast<int*>(event))) return CUDA_ERROR_INVALID_HANDLE;
    delete reinterpret_cast<int*>(event);
    return CUDA_SUCCESS;
}

// For tests: whether memory is the device's, and a line in the log.
extern "C" __attribute__((visibility("default"))) int fakeDriverHolds(CUdeviceptr address, size_t size) {
    LOCKED;
    return holds(address, size);
}
extern "C" __attribute__((visibility("default"))) void fakeDriverMark(char const* name) {
    LOCKED;
    state.say("\"call\": \"mark\", \"name\": \"%s\"", name);
}

FAKE cuModuleLoadData(CUmodule* module, void const* code) {
    APART;  // loading waits for the device
    auto made = std::make_unique<Module>();
    if (!read(*made, static_cast<unsigned char const*>(code))) return CUDA_ERROR_INVALID_IMAGE;
    state.modules.insert(made.get());
    *module = reinterpret_cast<CUmodule>(made.release());
    state.say("\"call\": \"module\"");
    return CUDA_SUCCESS;
}
FAKE cuModuleUnload(CUmodule module) {
    APART;
    Module* const found = reinterpret_cast<Module*>(module);
    if (!state.modules.erase(found)) return CUDA_ERROR_INVALID_HANDLE;
    delete found;
    return CUDA_SUCCESS;
}
FAKE cuModuleGetFunction(CUfunction* function, CUmodule module, char const* name) {
    LOCKED;
    auto& known = reinterpret_cast<Module*>(module)->functions;
    auto const found = known.find(name);
    if (found == known.end()) return CUDA_ERROR_NOT_FOUND;
    *function = reinterpret_cast<CUfunction>(&found->second);
    return CUDA_SUCCESS;
}
// Modules are loaded lazily: a function is on the device once it is asked for or launched.
FAKE cuFuncLoad(CUfunction function) {
    APART;
    reinterpret_cast<Function*>(function)->loaded = true;
    return CUDA_SUCCESS;
}
FAKE cuFuncSetAttribute(CUfunction function, CUfunction_attribute kind, int value) {
    if (kind == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
        reinterpret_cast<Function*>(function)->allowed = value;
    return CUDA_SUCCESS;
}

FAKE cuLaunchKernel(CUfunction handle, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned,
    unsigned, unsigned shared, CUstream, void** values, void**) {
    LOCKED;
    if (!current) return CUDA_ERROR_INVALID_CONTEXT;
    Function& function = *reinterpret_cast<Function*>(handle);
    if (!function.loaded && state.captures) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    function.loaded = true;
    if (!x || !y || !z || y > 65535 || z > 65535 || threads > 1024) return CUDA_ERROR_INVALID_VALUE;
    if (static_cast<int>(shared) > function.allowed) return CUDA_ERROR_INVALID_VALUE;
    bool const others = setting("FAKE_DRIVER_OTHERS_MEMORY", 0);
    std::string arguments;
    for (size_t i = 0; i < function.sizes.size(); ++i) {
        long long value = 0;
        std::memcpy(&value, values[i], function.sizes[i]);
        // A pointer is null, or in memory that there is.
        if (function.sizes[i] == 8 && value && !others && !state.holds(reinterpret_cast<void*>(value)))
            return CUDA_ERROR_ILLEGAL_ADDRESS;
        arguments += (i ? ", " : "") + std::to_string(value);
    }
    state.say("\"call\": \"launch\", \"entry\": \"%s\", \"grid\": [%u, %u, %u], \"threads\": %u, "
              "\"shared\": %u, \"captured\": %s, \"arguments\": [%s]",
        function.name.c_str(), x, y, z, threads, shared, state.captures ? "true" : "false",
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
