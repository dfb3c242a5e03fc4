// The files of an exported folder, each compared with its checksum, and the tensors in them.
#pragma once

#include <ATen/ATen.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <unordered_map>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <torch/version.h>
#include <unistd.h>

#include "json_reader.h"

namespace dunes {

using Tensors = std::unordered_map<std::string, at::Tensor>;

[[noreturn]] inline void fail(const std::string &message) { throw std::runtime_error(message); }

// A file in memory, shared with other processes that open it.
class Mapped {
 public:
  explicit Mapped(const std::string &path) {
    int file = open(path.c_str(), O_RDONLY);
    struct stat status {};
    if (file < 0 || fstat(file, &status)) {
      if (file >= 0) close(file);
      fail(path + ": cannot be read: " + std::strerror(errno));
    }
    size = static_cast<size_t>(status.st_size);
    void *start = size ? mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0) : nullptr;
    close(file);
    if (start == MAP_FAILED) fail(path + ": cannot be mapped: " + std::strerror(errno));
    data = static_cast<uint8_t *>(start);
  }
  Mapped(const Mapped &) = delete;
  Mapped &operator=(const Mapped &) = delete;
  ~Mapped() {
    if (data) munmap(data, size);
  }
  uint8_t *data = nullptr;
  size_t size = 0;
};

// The sum of the file's words of 8 bytes, each mixed with its place (https://prng.di.unimi.it/splitmix64.c): no
// single word can change without the sum. It finds damage, not malice.
inline std::string checksum(const Mapped &file) {
  uint64_t sum = file.size;
  auto add = [&](size_t i, size_t bytes) {
    uint64_t word = 0;
    std::memcpy(&word, file.data + 8 * i, bytes);
    word += i * 0x9E3779B97F4A7C15;
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9;
    word = (word ^ word >> 27) * 0x94D049BB133111EB;
    sum += word ^ word >> 31;
  };
  for (size_t i = 0; i < file.size / 8; i++) add(i, 8);
  if (file.size % 8) add(file.size / 8, file.size % 8);
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(sum));
  return text;
}

inline at::ScalarType dtype(const std::string &code) {
  static const std::unordered_map<std::string, at::ScalarType> types = {
      {"F64", at::kDouble}, {"F32", at::kFloat}, {"F16", at::kHalf}, {"BF16", at::kBFloat16}, {"I64", at::kLong},
      {"I32", at::kInt},    {"I16", at::kShort}, {"I8", at::kChar},  {"U8", at::kByte},       {"BOOL", at::kBool}};
  auto type = types.find(code);
  if (type == types.end()) fail("has numbers of an unknown type " + code);
  return type->second;
}

// Views of a safetensors file: https://github.com/huggingface/safetensors#format
inline Tensors read_tensors(const std::shared_ptr<Mapped> &file) {
  uint64_t length = 0;
  if (file->size < 8) fail("is no safetensors file");
  std::memcpy(&length, file->data, 8);
  if (length > file->size - 8) fail("is no safetensors file, or is truncated");
  Json header = JsonReader::read(std::string(reinterpret_cast<char *>(file->data) + 8, length));
  uint8_t *start = file->data + 8 + length;
  int64_t available = static_cast<int64_t>(file->size - 8 - length);
  Tensors tensors;
  for (auto &[name, entry] : header.fields) {
    if (name == "__metadata__") continue;
    auto type = dtype(entry.at("dtype").text);
    auto shape = entry.at("shape").numbers(), range = entry.at("data_offsets").numbers();
    int64_t bytes = static_cast<int64_t>(c10::elementSize(type));
    for (auto size : shape)
      if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) fail("has a wrong shape of " + name);
    if (range.size() != 2 || range[0] < 0 || range[1] > available || range[1] - range[0] != bytes)
      fail("has wrong offsets of " + name);
    tensors[name] = at::from_blob(start + range[0], shape, [file](void *) {}, at::TensorOptions(type));
  }
  return tensors;
}

inline std::set<std::string> words(const std::string &text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

// The names of what this processor can, as Linux lists them; empty on other systems.
inline std::set<std::string> processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("flags", 0) == 0 || line.rfind("Features", 0) == 0) return words(line.substr(line.find(':') + 1));
  return {};
}

// A folder whose card fits this machine and this program. Its files are checked when they are opened.
class Folder {
 public:
  explicit Folder(const std::string &path) : path_(path) {
    Mapped file(path + "/card.json");
    try {
      card = JsonReader::read(std::string(reinterpret_cast<char *>(file.data), file.size));
      if (card.at("format").number() != 1) fail("has another format; export it again with this program's version");
      check_machine();
    } catch (const std::runtime_error &error) {
      fail(path + "/card.json: " + error.what());
    }
  }

  bool has(const std::string &name) const { return card.at("files").has(name); }

  std::shared_ptr<Mapped> open(const std::string &name) const {
    auto file = std::make_shared<Mapped>(path_ + "/" + name);
    if (checksum(*file) != card.at("files").at(name).text)
      fail(path_ + "/" + name + ": not the bytes that were written; export it again");
    return file;
  }

  // A file that the system loads; the path.
  std::string checked(const std::string &name) const {
    open(name);
    std::string json = name.substr(0, name.rfind('.')) + ".json";
    if (has(json)) open(json);
    return path_ + "/" + name;
  }

  Tensors tensors(const std::string &name) const {
    try {
      return read_tensors(open(name));
    } catch (const std::runtime_error &error) {
      std::string message = error.what();
      fail(message.rfind(path_, 0) == 0 ? message : path_ + "/" + name + ": " + message);
    }
  }

  Json card;

 private:
  void check_machine() const {
    struct utsname here {};
    uname(&here);
    auto &system = card.at("system").text, &machine = card.at("machine").text;
    if (system != here.sysname || machine != here.machine)
      fail("was exported for " + system + " on " + machine + "; this is " + here.sysname + " on " + here.machine);
    if (card.at("torch").text != TORCH_VERSION)
      fail("was exported by torch " + card.at("torch").text + "; this program was built with " TORCH_VERSION
           ": export again, or build it with that one");
    auto available = processor();
    for (auto &needed : words(card.at("instructions").text))
      if (!available.count(needed)) fail("needs a processor with " + needed + "; export it again on this machine");
  }

  std::string path_;
};

}  // namespace dunes
