#include "modules.h"

#include <map>
#include <mutex>
#include <utility>

namespace linexport {

Module::Module(std::string const& code) {
    check(Driver::get().ctxGetCurrent(&mContext));
    check(Driver::get().moduleLoadData(&mHandle, code.data()));
}

Module::~Module() {
    DriverContext before = nullptr;
    Driver const& driver = Driver::get();
    driver.ctxGetCurrent(&before);
    driver.ctxSetCurrent(mContext);
    driver.moduleUnload(mHandle);
    driver.ctxSetCurrent(before);
}

std::shared_ptr<Module> Module::of(std::string const& code) {
    static std::mutex mutex;
    static std::map<std::pair<DriverContext, std::string>, std::weak_ptr<Module>> loaded;
    DriverContext context = nullptr;
    check(Driver::get().ctxGetCurrent(&context));
    std::lock_guard<std::mutex> const locked(mutex);
    for (auto at = loaded.begin(); at != loaded.end();) at = at->second.expired() ? loaded.erase(at) : std::next(at);
    std::weak_ptr<Module>& known = loaded[{context, code}];
    std::shared_ptr<Module> found = known.lock();
    if (!found) known = found = std::make_shared<Module>(code);
    return found;
}

}  // namespace linexport
