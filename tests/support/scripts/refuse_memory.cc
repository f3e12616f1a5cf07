// Loaded before a program: refuses memory of LEAST bytes or more to threads other than the first, while it is told to.
// Not to the loader, which allocates thread-local data at a thread's first use of it, and ends the program without.
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>

static std::atomic<std::size_t> least{0};
static std::atomic<long> refused{0};

static bool is_loader(void* caller) {
  Dl_info found;
  return dladdr(caller, &found) && found.dli_fname && std::strstr(found.dli_fname, "/ld-");
}

extern "C" {
void* __libc_malloc(std::size_t size);

void refuse_from(std::size_t bytes) { least = bytes; }
long refusals() { return refused; }

void* malloc(std::size_t size) {
  const std::size_t limit = least;
  if (limit && size >= limit && syscall(SYS_gettid) != getpid() && !is_loader(__builtin_return_address(0))) {
    ++refused;
    return nullptr;
  }
  return __libc_malloc(size);
}
}
