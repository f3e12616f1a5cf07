// Compiled kernels in the driver: see linexport/plugins/tensorrt/modules.py.
#pragma once

#include <memory>

#include "driver.h"

namespace linexport {

// A module of the context that was current when it was loaded; the last owner unloads it.
class Module {
public:
    explicit Module(std::string const& code);
    Module(Module const&) = delete;
    Module& operator=(Module const&) = delete;
    ~Module();

    DriverModule handle() const { return mHandle; }

    // That of a cubin in the current context: one for all that ask; throws Error.
    static std::shared_ptr<Module> of(std::string const& code);

private:
    DriverContext mContext = nullptr;
    DriverModule mHandle = nullptr;
};

}  // namespace linexport
