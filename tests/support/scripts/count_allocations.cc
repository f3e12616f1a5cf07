// Counts what the library allocates: it is linked with libstdc++ inside it and --wrap=malloc.
#include <atomic>
#include <cstddef>

static std::atomic<long> allocations;

extern "C" {
void* __real_malloc(std::size_t size);

void* __wrap_malloc(std::size_t size) {
  ++allocations;
  return __real_malloc(size);
}

long linexport_allocations() { return allocations; }
}
