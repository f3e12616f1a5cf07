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
    found.funcLoad = reinterpret_cast<decltype(found.funcLoad)>(dlsym(library, "cuFuncLoad"));
    return found;
}

}  // namespace

Driver const& Driver::get() {
    static Driver const driver = load();
    return driver;
}

void check(int result) {
    if (result != 0) throw Error("The CUDA driver reports error " + std::to_string(result));
}

int attribute(int kind) {
    int device = 0, value = 0;
    check(Driver::get().ctxGetDevice(&device));
    check(Driver::get().deviceGetAttribute(&value, kind, device));
    return value;
}

}  // namespace linexport
