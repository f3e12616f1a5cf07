// Fuzzing by mutation, guided by coverage: what libFuzzer does, for g++, which has no libFuzzer.
//
//   FUZZER FOLDER SECONDS SEED LAST
//
// SECONDS are of the processor: it may run where others have the machine. FOLDER has the corpus, a file each.
// An input that reaches an edge of the program that none has reached is kept, in memory, and mutated further. LAST is the file that has the input at hand, behind the four bytes of its
// length. Texts of `dictionary()` are inserted whole. A corpus of one input and 0 seconds runs it once.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

void fuzz(std::string const& input);
std::vector<std::string> const& dictionary();

namespace {

size_t constexpr edges = size_t{1} << 16, longest = size_t{1} << 16;
unsigned constexpr slow = 20;  // seconds of the processor after which one input is taken to hang
unsigned constexpr waits = 600;  // seconds, of an input that waits for something

uint8_t reached[edges];  // by the input at hand
bool known[edges];
std::string input;

// The input at hand in a file, whose pages outlive the program: a length, and so many bytes.
char* opened(char const* name) {
    int const file = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
    size_t const size = sizeof(uint32_t) + longest;
    if (file < 0 || ftruncate(file, size)) return nullptr;
    void* const place = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return place == MAP_FAILED ? nullptr : static_cast<char*>(place);
}

char* last = nullptr;

void limit(unsigned ofProcessor, unsigned ofClock) {
    itimerval const timer{{0, 0}, {ofProcessor, 0}};
    setitimer(ITIMER_PROF, &timer, nullptr);
    alarm(ofClock);
}

double seconds() { return double(std::clock()) / CLOCKS_PER_SEC; }

void onAlarm(int) {
    static char const text[] = "an input takes too long\n";
    if (write(2, text, sizeof text - 1)) {}
    _exit(1);
}

class Mutator {
public:
    explicit Mutator(uint64_t seed) : mRandom(seed) {}

    size_t below(size_t end) { return end ? mRandom() % end : 0; }

    std::string mutated(std::vector<std::string> const& corpus) {
        std::string text = corpus[below(corpus.size())];
        for (size_t left = 1 + below(4); left; --left) change(text, corpus);
        text.resize(std::min(text.size(), longest));
        return text;
    }

private:
    void change(std::string& text, std::vector<std::string> const& corpus) {
        size_t const at = below(text.size() + 1), count = 1 + below(size_t{1} << below(10));
        switch (below(8)) {
        case 0:
            if (at < text.size()) text[at] ^= static_cast<char>(1 << below(8));
            return;
        case 1: text.erase(at, count); return;
        case 2: text.insert(at, text.substr(below(text.size() + 1), count)); return;
        case 3: text.insert(at, dictionary()[below(dictionary().size())]); return;
        case 4: {
            std::string const& other = corpus[below(corpus.size())];
            text.insert(at, other.substr(below(other.size() + 1), count));
            return;
        }
        case 5: text.insert(at, std::string(count * 8, dictionary()[below(dictionary().size())][0])); return;
        case 6: {  // a word in the place of another
            size_t const start = text.find_first_of("0123456789-", at);
            if (start == std::string::npos) return;
            size_t const end = text.find_first_not_of("0123456789-.e+", start);
            static char const* const numbers[] = {"0", "1", "-1", "2", "7", "24", "63", "64", "65", "2147483648", "9223372036854775807", "1e300", "4194304"};
            text.replace(start, (end == std::string::npos ? text.size() : end) - start, numbers[below(std::size(numbers))]);
            return;
        }
        default:
            if (at < text.size()) text[at] = static_cast<char>(below(256));
        }
    }

    std::mt19937_64 mRandom;
};

// Whether the input reached something new.
bool run() {
    std::memset(reached, 0, sizeof reached);
    uint32_t const size = static_cast<uint32_t>(input.size());
    std::memcpy(last, &size, sizeof size);
    std::memcpy(last + sizeof size, input.data(), size);
    limit(slow, waits);
    fuzz(input);
    limit(0, 0);
    bool found = false;
    for (size_t i = 0; i < edges; ++i)
        if (reached[i] && !known[i]) found = known[i] = true;
    return found;
}

}  // namespace

extern "C" __attribute__((no_sanitize_coverage)) void __sanitizer_cov_trace_pc() {
    uintptr_t const place = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
    reached[(place ^ place >> 16) % edges] = 1;
}

int main(int, char** arguments) {
    last = opened(arguments[4]);
    if (!last) return 2;
    signal(SIGALRM, onAlarm);
    signal(SIGPROF, onAlarm);
    std::vector<std::string> corpus;
    for (auto const& entry : std::filesystem::directory_iterator(arguments[1])) {
        std::ifstream file(entry.path(), std::ios::binary);
        corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    for (std::string const& one : corpus) {
        input = one;
        run();
    }
    size_t const given = corpus.size();
    Mutator mutator(std::strtoull(arguments[3], nullptr, 10));
    double const end = seconds() + std::atof(arguments[2]);
    long runs = 0;
    for (; seconds() < end; ++runs) {
        input = mutator.mutated(corpus);
        if (run()) corpus.push_back(input);
    }
    long covered = 0;
    for (bool edge : known) covered += edge;
    std::printf("%ld runs, %ld edges, %zu inputs added\n", runs, covered, corpus.size() - given);
}
