#include "driver.h"

#include <dlfcn.h>

#include "description.h"

namespace linexport {
namespace {

Driver load() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) throw Error("No NVIDIA driver was found: libcuda.so.1 does not load.");
    auto const find = [library](auto& function, char const* name) {
        function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
        if (!function) throw Error(std::string("The NVIDIA driver has no ") + name);
    };
    Driver found{};
    find(found.ctxGetCurrent, "cuCtxGetCurrent");
    find(found.ctxSetCurrent, "cuCtxSetCurrent");
    find(found.ctxGetDevice, "cuCtxGetDevice");
    find(found.deviceGetAttribute, "cuDeviceGetAttribute");
    find(found.moduleLoadData, "cuModuleLoadData");
    find(found.moduleUnload, "cuModuleUnload");
    find(found.moduleGetFunction, "cuModuleGetFunction");
    find(found.funcSetAttribute, "cuFuncSetAttribute");
    find(found.launchKernel, "cuLaunchKernel");
    found.funcLoad = reinterpret_cast<CUresult (*)(CUfunction)>(dlsym(library, "cuFuncLoad"));
    return found;
}

}  // namespace

Driver const& Driver::get() {
    static Driver const driver = load();
    return driver;
}

void check(CUresult result) {
    if (result != CUDA_SUCCESS)
        throw Error("The CUDA driver reports error " + std::to_string(static_cast<int>(result)));
}

int attribute(CUdevice_attribute kind) {
    CUdevice device = 0;
    int value = 0;
    check(Driver::get().ctxGetDevice(&device));
    check(Driver::get().deviceGetAttribute(&value, kind, device));
    return value;
}

}  // namespace linexport
