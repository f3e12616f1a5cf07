// The driver's functions, found when first needed: engines are also built where there is no driver.
//
// They are declared here, so that the libraries compile where there is no CUDA toolkit either.
#pragma once

#include <string>

struct CUctx_st;
struct CUmod_st;
struct CUfunc_st;
struct CUstream_st;

namespace linexport {

using DriverContext = CUctx_st*;
using DriverModule = CUmod_st*;
using DriverFunction = CUfunc_st*;
using DriverStream = CUstream_st*;

struct Driver {
    // Attributes of a device, and one of a function.
    enum : int { multiprocessorCount = 16, capabilityMajor = 75, capabilityMinor = 76 };
    enum : int { maxDynamicShared = 8 };

    int (*ctxGetCurrent)(DriverContext*);
    int (*ctxSetCurrent)(DriverContext);
    int (*ctxGetDevice)(int*);
    int (*deviceGetAttribute)(int* value, int kind, int device);
    int (*moduleLoadData)(DriverModule*, void const* code);
    int (*moduleUnload)(DriverModule);
    int (*moduleGetFunction)(DriverFunction*, DriverModule, char const* name);
    int (*funcSetAttribute)(DriverFunction, int kind, int value);
    int (*funcLoad)(DriverFunction);  // null in drivers before CUDA 12.4
    int (*launchKernel)(DriverFunction, unsigned gridX, unsigned gridY, unsigned gridZ, unsigned blockX,
        unsigned blockY, unsigned blockZ, unsigned shared, DriverStream, void** arguments, void** extra);

    static Driver const& get();
};

// Throws Error where a call of the driver failed.
void check(int result);

// Of the current context's GPU.
int attribute(int kind);

}  // namespace linexport
