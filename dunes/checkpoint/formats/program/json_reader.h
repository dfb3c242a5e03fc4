// A reader of JSON: of the card, and of the headers of safetensors files.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace dunes {

// A number keeps its text, so that whole numbers are exact.
struct Json {
  std::string text;
  std::vector<Json> items;
  std::map<std::string, Json> fields;

  const Json &at(const std::string &key) const {
    auto found = fields.find(key);
    if (found == fields.end()) throw std::runtime_error("has no \"" + key + "\"");
    return found->second;
  }
  bool has(const std::string &key) const { return fields.count(key) > 0; }
  int64_t number() const {
    char *end = nullptr;
    int64_t value = std::strtoll(text.c_str(), &end, 10);
    if (text.empty() || *end) throw std::runtime_error("\"" + text.substr(0, 40) + "\" is not a whole number");
    return value;
  }
  std::vector<int64_t> numbers() const {
    std::vector<int64_t> values;
    for (auto &item : items) values.push_back(item.number());
    return values;
  }
};

class JsonReader {
 public:
  static Json read(const std::string &text) {
    JsonReader reader{text};
    Json value = reader.value(0);
    reader.skip();
    if (reader.at_ < text.size()) reader.fail();
    return value;
  }

 private:
  explicit JsonReader(const std::string &text) : text_(text) {}

  [[noreturn]] void fail() const {
    throw std::runtime_error("is not JSON at byte " + std::to_string(at_));
  }
  void skip() {
    while (at_ < text_.size() && std::string(" \t\r\n").find(text_[at_]) != std::string::npos) at_++;
  }
  bool take(char c) {
    skip();
    bool is = at_ < text_.size() && text_[at_] == c;
    at_ += is;
    return is;
  }
  void expect(char c) {
    if (!take(c)) fail();
  }
  Json value(int depth) {
    if (depth > 16) fail();
    Json json;
    if (take('{')) {
      while (!take('}')) {
        if (!json.fields.empty()) expect(',');
        std::string key = (skip(), string());
        expect(':');
        json.fields[key] = value(depth + 1);
      }
    } else if (take('[')) {
      while (!take(']')) {
        if (!json.items.empty()) expect(',');
        json.items.push_back(value(depth + 1));
      }
    } else if (at_ < text_.size() && text_[at_] == '"') {
      json.text = string();
    } else {
      size_t begin = at_;
      while (at_ < text_.size() && std::string(",]} \t\r\n").find(text_[at_]) == std::string::npos) at_++;
      if (at_ == begin) fail();
      json.text = text_.substr(begin, at_ - begin);
    }
    return json;
  }
  // Names in these files are ASCII without escapes, but for \" and the like.
  std::string string() {
    if (at_ >= text_.size() || text_[at_] != '"') fail();
    std::string result;
    for (at_++; at_ < text_.size() && text_[at_] != '"'; at_++) {
      if (text_[at_] == '\\' && (++at_ >= text_.size() || std::string("\"\\/").find(text_[at_]) == std::string::npos)) fail();
      result += text_[at_];
    }
    if (at_++ >= text_.size()) fail();
    return result;
  }

  const std::string &text_;
  size_t at_ = 0;
};

}  // namespace dunes
