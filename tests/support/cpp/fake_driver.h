// The state of the stand-in for the CUDA driver: what is allocated, captured and loaded, and the log.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

struct Function {
    std::string name;
    std::vector<unsigned> sizes;  // of its parameters, in bytes
    int allowed = 48 * 1024;      // dynamic shared memory
    bool loaded = false;          // otherwise the first launch does it
};

struct Module {
    std::map<std::string, Function> functions;
};

using Work = std::function<void()>;

struct Graph {
    std::vector<Work> nodes;
};

struct Stream {
    Graph* capturing = nullptr;
};

struct Context {
    int device = 0, retained = 0;
};

int setting(char const* name, int otherwise) {
    char const* const given = std::getenv(name);
    return given ? std::atoi(given) : otherwise;
}

struct State {
    std::recursive_mutex mutex;
    std::map<char*, size_t> memory;
    std::set<Module*> modules;
    std::set<Stream*> streams;
    std::set<Graph*> graphs, executables;
    std::set<int*> events;
    std::map<int, Context> contexts;
    int captures = 0;
    std::FILE* log = nullptr;

    State() {
        if (char const* name = std::getenv("FAKE_DRIVER_LOG")) log = std::fopen(name, "a");
    }
    ~State() {
        int retained = 0;
        for (auto const& [device, context] : contexts) retained += context.retained;
        say("\"call\": \"end\", \"allocations\": %zu, \"modules\": %zu, \"streams\": %zu, "
            "\"graphs\": %zu, \"events\": %zu, \"contexts\": %d",
            memory.size(), modules.size(), streams.size(), graphs.size() + executables.size(),
            events.size(), retained);
        if (log) std::fclose(log);
    }
    void say(char const* format, ...) {
        if (!log) return;
        va_list values;
        va_start(values, format);
        std::fputc('{', log);
        std::vfprintf(log, format, values);
        std::fputs("}\n", log);
        std::fflush(log);
        va_end(values);
    }
    bool holds(void const* address) const {
        auto after = memory.upper_bound(static_cast<char*>(const_cast<void*>(address)));
        if (after == memory.begin()) return false;
        auto const& [start, size] = *std::prev(after);
        return address < start + size;
    }
} state;

thread_local Context* current = nullptr;

// What needs a context, and must not happen while a stream is captured.
CUresult apart() {
    if (!current) return CUDA_ERROR_INVALID_CONTEXT;
    return state.captures ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

// Work on a stream: done now, or kept for the graph.
CUresult put(CUstream handle, Work work) {
    if (!current) return CUDA_ERROR_INVALID_CONTEXT;
    Stream* const stream = reinterpret_cast<Stream*>(handle);
    if (!state.streams.count(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capturing)
        stream->capturing->nodes.push_back(std::move(work));
    else
        work();
    return CUDA_SUCCESS;
}

#define LOCKED std::lock_guard<std::recursive_mutex> const locked(state.mutex)
#define APART                                              \
    LOCKED;                                                \
    if (CUresult const wrong = apart(); wrong != CUDA_SUCCESS) return wrong

template <typename Number>
Number at(unsigned char const* code, size_t offset) {
    Number found;
    std::memcpy(&found, code + offset, sizeof found);
    return found;
}

// Sizes of the parameters from a section .nv.info.NAME: attribute 0x17 has a parameter's ordinal, its
// offset, and its size in the upper 14 bits of the last word.
std::vector<unsigned> parameters(unsigned char const* data, size_t size) {
    std::map<unsigned, unsigned> found;
    for (size_t place = 0; place + 4 <= size;) {
        unsigned const format = data[place], kind = data[place + 1], length = at<uint16_t>(data, place + 2);
        if (format == 4 && kind == 0x17)
            found[at<uint16_t>(data, place + 8)] = at<uint32_t>(data, place + 12) >> 18;
        place += 4 + (format == 4 ? length : 0);
    }
    std::vector<unsigned> sizes;
    for (auto const& [ordinal, bytes] : found) sizes.push_back(bytes);
    return sizes;
}

bool read(Module& module, unsigned char const* code) {
    if (std::memcmp(code, "\177ELF", 4)) return false;
    size_t const table = at<uint64_t>(code, 0x28), entry = at<uint16_t>(code, 0x3a);
    size_t const count = at<uint16_t>(code, 0x3c), names = at<uint16_t>(code, 0x3e);
    auto const offset = [&](size_t i) { return at<uint64_t>(code, table + i * entry + 24); };
    for (size_t i = 0; i < count; ++i) {
        char const* const name =
            reinterpret_cast<char const*>(code) + offset(names) + at<uint32_t>(code, table + i * entry);
        if (std::strncmp(name, ".nv.info.", 9)) continue;
        size_t const size = at<uint64_t>(code, table + i * entry + 32);
        module.functions[name + 9] = {name + 9, parameters(code + offset(i), size)};
    }
    return !module.functions.empty();
}

char* pointer(CUdeviceptr address) { return reinterpret_cast<char*>(address); }

bool holds(CUdeviceptr address, size_t size) {
    return !size || (state.holds(pointer(address)) && state.holds(pointer(address) + size - 1));
}

}  // namespace
