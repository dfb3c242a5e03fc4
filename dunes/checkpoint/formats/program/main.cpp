// Continue a text, or classify an image: the program on the library.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "dunes.h"

namespace {

constexpr const char *USAGE =
#define USAGE_OF(type, name, option, ...) " [" option "]"
    "usage: dunes FOLDER [--max-tokens N]" DUNES_RULES(USAGE_OF) " [--seed S] [--threads N] [--time] PROMPT\n"
    "       dunes FOLDER --ids \"ID ID ...\"    the prompt's ids; writes ids, one a line\n"
    "       dunes FOLDER --image FILE.pgm     the class of a grey image (binary PGM, 0 to 255), then all outputs\n";

struct Options {
  std::string folder, prompt, ids, image;
  dunes_sampling sampling{};
  int64_t max_tokens = 256;
  bool time = false;
};

[[noreturn]] void fail(const std::string &message) { throw std::runtime_error(message); }

// A seed is below 2^64; a negative one is taken modulo 2^64, as in Python.
template <typename Value>
void read(Value &value, const std::string &name, const std::string &text) {
  constexpr const char *expected = std::is_floating_point_v<Value> ? "a number"
                                   : std::is_signed_v<Value>       ? "a whole number below 2^63"
                                                                   : "a whole number below 2^64";
  std::istringstream stream(text);
  if (!(stream >> value) || !stream.eof()) fail(name + " " + text + ": expected " + expected);
}

int64_t whole(const std::string &name, const std::string &text) {
  int64_t value = 0;
  read(value, name, text);
  return value;
}

Options parse(int count, char **arguments) {
  Options options;
  std::vector<std::string> rest;
  for (int i = 1; i < count; i++) {
    std::string name = arguments[i];
    if (name == "--time") {
      options.time = true;
    } else if (name.rfind("--", 0) == 0) {
      if (++i == count) fail(name + ": expected a value");
      std::string value = arguments[i];
      if (name == "--max-tokens") options.max_tokens = whole(name, value);
#define READ(type, field, option, ...) else if (std::string(option).find(name + " ") == 0) read(options.sampling.field, name, value);
      DUNES_RULES(READ)
      else if (name == "--seed") read(options.sampling.seed, name, value);
      else if (name == "--threads") dunes_set_threads(static_cast<int>(whole(name, value)));
      else if (name == "--ids") options.ids = value;
      else if (name == "--image") options.image = value;
      else fail(name + ": no such option\n" + USAGE);
    } else {
      rest.push_back(name);
    }
  }
  if (rest.empty() || rest.size() > 2) fail(USAGE);
  options.folder = rest[0];
  if (rest.size() > 1) options.prompt = rest[1];
  return options;
}

std::vector<int64_t> prompt_ids(const dunes_model *model, const Options &options) {
  std::vector<int64_t> ids;
  std::istringstream stream(options.ids);
  for (std::string word; stream >> word;) ids.push_back(whole("--ids", word));
  if (!options.ids.empty()) return ids;
  if (*dunes_no_tokenizer(model)) fail(std::string(dunes_no_tokenizer(model)) + ": use --ids");
  auto &text = options.prompt;
  ids.resize(text.size() + 16);
  int64_t count = dunes_prompt(model, text.data(), static_cast<int64_t>(text.size()), ids.data(), static_cast<int64_t>(ids.size()));
  if (count < 0 || count > static_cast<int64_t>(ids.size())) fail(dunes_error());
  ids.resize(static_cast<size_t>(count));
  return ids;
}

void write(const dunes_model *model, const Options &options, int64_t id) {
  if (!options.ids.empty()) {
    std::cout << id << std::endl;
    return;
  }
  int64_t bytes = 0;
  const char *token = dunes_token(model, id, &bytes);
  std::cout.write(token, bytes).flush();
}

void generate(dunes_model *model, const Options &options) {
  using Clock = std::chrono::steady_clock;
  auto ids = prompt_ids(model, options);
  auto begin = Clock::now(), first = begin;
  dunes_text *text = dunes_start(model, ids.data(), static_cast<int64_t>(ids.size()), options.max_tokens, &options.sampling);
  if (!text) fail(dunes_error());
  if (options.ids.empty()) std::cout << options.prompt;
  int64_t id = 0, count = 0;
  while ((id = dunes_next(text)) >= 0) {
    if (count++ == 0) first = Clock::now();
    write(model, options, id);
  }
  std::chrono::duration<double> reading = first - begin, writing = Clock::now() - first;
  dunes_free(text);
  if (id == DUNES_ERROR) fail(dunes_error());
  if (options.ids.empty()) std::cout << std::endl;
  if (options.time)
    std::fprintf(stderr, "%zu ids read in %.4f s, %lld more in %.4f s: %.1f tokens/s\n", ids.size(), reading.count(),
                 static_cast<long long>(std::max<int64_t>(count - 1, 0)), writing.count(),
                 static_cast<double>(std::max<int64_t>(count - 1, 0)) / writing.count());
}

// The pixels of a grey image, from 0 to 255. Comments in its header are skipped.
std::vector<float> read_pgm(const std::string &path, int64_t rows, int64_t columns) {
  std::ifstream file(path, std::ios::binary);
  std::vector<std::string> header;
  for (std::string word; header.size() < 4 && file >> word;) {
    if (word[0] == '#') std::getline(file, word);
    else header.push_back(word);
  }
  std::string size = std::to_string(columns) + " x " + std::to_string(rows);
  if (header.size() < 4 || header[0] != "P5" || header[3] != "255") fail(path + ": not a binary PGM of 8 bits");
  if (header[1] + " x " + header[2] != size) fail(path + ": " + header[1] + " x " + header[2] + " pixels; expected " + size);
  file.get();
  std::string bytes(static_cast<size_t>(rows * columns), '\0');
  if (!file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()))) fail(path + ": truncated");
  auto begin = reinterpret_cast<const unsigned char *>(bytes.data());
  return {begin, begin + bytes.size()};
}

void classify(dunes_model *model, const std::string &path) {
  int64_t inputs = 0, outputs = 0, rows = 0, columns = 0;
  if (dunes_sizes(model, &inputs, &outputs, &rows, &columns)) fail(dunes_error());
  if (inputs != rows * columns) fail("the network takes no grey image: call dunes_run with its " + std::to_string(inputs) + " numbers");
  std::vector<float> output(static_cast<size_t>(outputs));
  if (dunes_run(model, read_pgm(path, rows, columns).data(), output.data())) fail(dunes_error());
  std::cout << std::max_element(output.begin(), output.end()) - output.begin() << std::endl;
  for (float value : output) std::printf("%.9g\n", static_cast<double>(value));
}

}  // namespace

int main(int count, char **arguments) {
  dunes_model *model = nullptr;
  int status = 0;
  try {
    Options options = parse(count, arguments);
    model = dunes_open(options.folder.c_str());
    if (!model) fail(dunes_error());
    if (!dunes_generates(model) && options.image.empty()) fail("this folder holds a network: give it --image FILE.pgm");
    if (options.image.empty()) generate(model, options);
    else classify(model, options.image);
  } catch (const std::exception &error) {
    std::cout << std::flush;
    std::cerr << "error: " << error.what() << std::endl;
    status = 2;
  }
  dunes_close(model);
  return status;
}
