// The driver's functions, found when first needed: engines are also built where there is no driver.
#pragma once

#include <cuda.h>

#include <string>

namespace linexport {

struct Driver {
    decltype(&cuCtxGetCurrent) ctxGetCurrent;
    decltype(&cuCtxSetCurrent) ctxSetCurrent;
    decltype(&cuCtxGetDevice) ctxGetDevice;
    decltype(&cuDeviceGetAttribute) deviceGetAttribute;
    decltype(&cuModuleLoadData) moduleLoadData;
    decltype(&cuModuleUnload) moduleUnload;
    decltype(&cuModuleGetFunction) moduleGetFunction;
    decltype(&cuFuncSetAttribute) funcSetAttribute;
    CUresult (*funcLoad)(CUfunction);  // null in drivers before CUDA 12.4
    decltype(&cuLaunchKernel) launchKernel;

    static Driver const& get();
};

// Throws Error where a call of the driver failed.
void check(CUresult result);

// Of the current context's GPU.
int attribute(CUdevice_attribute kind);

}  // namespace linexport
