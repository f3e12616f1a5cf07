// Loaded before a program: refuses memory of LEAST bytes or more to threads other than the first, while it is told to.
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>

static std::atomic<std::size_t> least{0};
static std::atomic<long> refused{0};

extern "C" {
void* __libc_malloc(std::size_t size);

void refuse_from(std::size_t bytes) { least = bytes; }
long refusals() { return refused; }

void* malloc(std::size_t size) {
  const std::size_t limit = least;
  if (limit && size >= limit && syscall(SYS_gettid) != getpid()) {
    ++refused;
    return nullptr;
  }
  return __libc_malloc(size);
}
}
