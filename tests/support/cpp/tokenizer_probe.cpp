// What linexport_text.h does with a file: probe encode FILE < texts, each ended by a NUL; probe choose FILE DRAWS
// TEMPERATURE TOP_K TOP_P MIN_P LOGIT...; probe shown STOP PIECE...
#include "linexport_text.h"

#include <cstdio>
#include <iostream>
#include <sstream>

int main(int count, char** arguments) try {
    std::string const what = arguments[1];
    if (what == "shown") {
        linexport::Shown shown({arguments[2]});
        for (int i = 3; i < count && !shown.stopped; ++i) std::cout << shown.feed(arguments[i]) << "|";
        std::cout << shown.end() << "\n";
        return 0;
    }
    linexport::Tokenizer const tokenizer(arguments[2]);
    if (what == "choose") {
        linexport::Settings settings;
        settings.temperature = std::atof(arguments[4]), settings.top_k = std::atoi(arguments[5]);
        settings.top_p = std::atof(arguments[6]), settings.min_p = std::atof(arguments[7]), settings.seed = 3;
        std::vector<float> given;
        for (int i = 8; i < count; ++i) given.push_back(std::strtof(arguments[i], nullptr));
        linexport::Chooser choose(settings);
        for (int n = std::atoi(arguments[3]); n; --n) {
            std::vector<float> logits = given;
            std::cout << choose(logits) << " ";
        }
        return 0;
    }
    for (std::string text; std::getline(std::cin, text, '\0');) {
        std::string back;
        for (uint32_t id : tokenizer.encode(text, true)) std::cout << id << " ", back += tokenizer.bytes(id);
        std::cout << "\n" << back << '\0';
    }
} catch (std::runtime_error const& error) {
    std::cerr << error.what() << "\n";
    return 1;
}
