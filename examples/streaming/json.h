// A reader of JSON, as much of it as manifest.json has: no surrogate pairs, and numbers as double.
#pragma once

#include <cctype>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

struct Json {
  enum Kind { kNull, kBool, kNumber, kString, kList, kObject } kind = kNull;
  double number = 0;
  std::string text;
  std::vector<Json> list;
  std::map<std::string, Json> object;

  const Json& operator[](const char* key) const {
    auto found = object.find(key);
    if (found == object.end()) throw std::runtime_error(std::string("no entry ") + key);
    return found->second;
  }
};

class JsonReader {
 public:
  static Json read(const std::string& text) {
    JsonReader reader(text);
    Json value = reader.value(0);
    if (reader.next() != '\0') reader.fail("nothing more");
    return value;
  }

 private:
  explicit JsonReader(const std::string& text) : text_(text) {}

  [[noreturn]] void fail(const char* expected) const {
    throw std::runtime_error("byte " + std::to_string(at_) + ": expected " + expected);
  }

  // The next character that is not white space, which is not taken.
  char next() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  void take(char expected) {
    if (next() != expected) fail(std::string(1, expected).c_str());
    ++at_;
  }

  bool word(const char* expected) {
    const std::string name = expected;
    if (text_.compare(at_, name.size(), name)) return false;
    at_ += name.size();
    return true;
  }

  Json value(int depth) {
    if (depth > 50) fail("fewer nested values");
    Json result;
    const char first = next();
    if (first == '{' || first == '[') return collection(first, depth);
    if (first == '"') {
      result.kind = Json::kString;
      result.text = string();
    } else if (word("true") || word("false")) {
      result.kind = Json::kBool;
    } else if (!word("null")) {
      const char* start = text_.c_str() + at_;
      char* end;
      result.kind = Json::kNumber;
      result.number = std::strtod(start, &end);
      if (end == start) fail("a value");
      at_ += end - start;
    }
    return result;
  }

  Json collection(char first, int depth) {
    Json result;
    const char last = first == '{' ? '}' : ']';
    result.kind = first == '{' ? Json::kObject : Json::kList;
    take(first);
    while (next() != last) {
      if (!result.list.empty() || !result.object.empty()) take(',');
      if (first == '[') {
        result.list.push_back(value(depth + 1));
        continue;
      }
      if (next() != '"') fail("a name");
      std::string name = string();
      take(':');
      result.object[name] = value(depth + 1);
    }
    take(last);
    return result;
  }

  std::string string() {
    std::string result;
    for (++at_; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (text_[at_] != '\\') {
        result += text_[at_];
        continue;
      }
      const char kind = ++at_ < text_.size() ? text_[at_] : '\0';
      if (kind == 'u') {
        utf8(std::strtoul(text_.substr(at_ + 1, 4).c_str(), nullptr, 16), result);
        at_ += 4;
      } else {
        const std::string letters = "\"\\/bfnrt", meanings = "\"\\/\b\f\n\r\t";
        const size_t place = letters.find(kind);
        if (place == std::string::npos) fail("an escape");
        result += meanings[place];
      }
    }
    if (at_ >= text_.size()) fail("the end of a string");
    ++at_;
    return result;
  }

  static void utf8(unsigned long code, std::string& out) {
    if (code < 0x80) {
      out += static_cast<char>(code);
    } else if (code < 0x800) {
      out += static_cast<char>(0xC0 | code >> 6);
      out += static_cast<char>(0x80 | (code & 0x3F));
    } else {
      out += static_cast<char>(0xE0 | code >> 12);
      out += static_cast<char>(0x80 | (code >> 6 & 0x3F));
      out += static_cast<char>(0x80 | (code & 0x3F));
    }
  }

  const std::string& text_;
  size_t at_ = 0;
};
