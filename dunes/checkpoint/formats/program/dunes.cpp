#include "dunes.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <pthread.h>
#include <sys/resource.h>

#include "folder.h"
#include "tokenizer.h"

using at::Tensor;
using namespace dunes;
using Runner = torch::inductor::AOTIModelContainerRunnerCpu;

namespace {

constexpr size_t STACK = 2 << 20;  // bytes: compiled code has up to half of it in buffers there
constexpr int64_t MIN_CAPACITY = 8;
thread_local std::string last_error;

// The result of `work`, or `failed` after an error, of which the first line is kept.
template <typename Work, typename Result>
Result attempt(Result failed, Work work) {
  try {
    c10::InferenceMode guard;
    return work();
  } catch (const c10::Error &error) {
    last_error = error.what_without_backtrace();
  } catch (const std::exception &error) {
    last_error = error.what();
  }
  last_error = last_error.substr(0, last_error.find('\n'));
  return failed;
}

// Throws in a thread whose stack is too small for compiled code, which would end the process.
void check_stack() {
  thread_local bool enough = false;
  if (enough) return;
  size_t size = 0;
#ifdef __linux__
  pthread_attr_t attributes;
  if (!pthread_getattr_np(pthread_self(), &attributes)) {
    pthread_attr_getstacksize(&attributes, &size);
    pthread_attr_destroy(&attributes);
  }
#else
  size = pthread_get_stacksize_np(pthread_self());
#endif
  if (size < STACK) fail("this thread has a stack of " + std::to_string(size) + " bytes; it needs " + std::to_string(STACK));
  enough = true;
}

// One compiled function, bound to tensors of these names, or of `prefix` and the name.
std::unique_ptr<Runner> load(const Folder &folder, const std::string &name, Tensors &weights, const std::string &prefix = "") {
  auto path = folder.checked(name);
  auto runner = std::make_unique<Runner>(path, 1);
  std::unordered_map<std::string, Tensor> constants;
  auto &aliases = folder.card.at("aliases").fields;
  for (auto &[constant, full] : runner->getConstantNamesToOriginalFQNs()) {
    std::string key = weights.count(prefix + full) || aliases.count(prefix + full) ? prefix + full : full;
    if (auto alias = aliases.find(key); alias != aliases.end()) key = alias->second.text;
    if (!weights.count(key)) fail(path + ": needs the weight " + full + ", which is missing");
    constants[constant] = weights.at(key);
  }
  runner->update_constant_buffer(constants, false, true, true);
  return runner;
}

// The functions of generate/sampling.py, by the names of the settings.
Tensor temperature(double value, const Tensor &logits) {
  return value == 1 ? logits : (logits - logits.amax()) / std::min(std::max(value, 1e-37), 1e37);
}

Tensor top_k(int64_t k, const Tensor &logits) {
  if (k < 0) return logits;
  return logits.masked_fill(logits < std::get<0>(logits.topk(std::min(k, logits.numel())))[-1], -INFINITY);
}

Tensor top_p(double p, const Tensor &logits) {
  if (p == 1) return logits;
  auto [sorted, order] = logits.sort(/*stable=*/true, -1, /*descending=*/true);
  auto probs = sorted.softmax(-1);
  auto surplus = probs.cumsum(-1) - probs >= p;
  surplus[0] = false;
  return logits.masked_fill(surplus.scatter(-1, order, surplus), -INFINITY);
}

Tensor min_p(double p, const Tensor &logits) {
  auto probs = logits.softmax(-1);
  return logits.masked_fill(probs < p * probs.amax(), -INFINITY);
}

Tensor typical_p(double p, const Tensor &logits) {
  if (p == 1) return logits;
  auto logprobs = logits.log_softmax(-1);
  auto distances = (-logprobs + (logprobs * logprobs.exp()).nansum(-1)).abs();
  auto [sorted, order] = distances.sort();
  auto last = (logits.index({order}).softmax(-1).cumsum(-1) < p).sum().clamp_max(logits.numel() - 1);
  return logits.masked_fill(distances > sorted.index({last}), -INFINITY);
}

}  // namespace

struct State {
  explicit State(const std::string &path) : folder(path), weights(folder.tensors("weights.safetensors")) {
    auto &card = folder.card;
    generates = card.at("kind").text == "decoder";
    one = load(folder, "native.so", weights);
    if (!generates) {
      input = card.at("input").numbers();
      output = card.at("output").numbers();
      return;
    }
    few = load(folder, "native-few.so", weights);
    if (folder.has("native-text.so")) text = load(folder, "native-text.so", weights, "text.");
    context_length = card.at("context_length").number();
    vocabulary = card.at("vocabulary").number();
    embedded = card.at("embedded").number();
    few_tokens = card.at("few").number();
    window = card.at("window").number();
    rolling = card.at("rolling").number();
    stops = card.at("stops").numbers();
    if (folder.has("tokenizer.safetensors")) tokenizer.emplace(folder.tensors("tokenizer.safetensors"));
  }

  Folder folder;
  Tensors weights;
  bool generates = false;
  std::unique_ptr<Runner> one, few, text;
  std::optional<Tokenizer> tokenizer;
  std::vector<int64_t> input, output, stops;
  // Of a window over all layers, and the slots of its cache; 0 without.
  int64_t window = 0, rolling = 0;
  int64_t context_length = 0, vocabulary = 0, embedded = 0, few_tokens = 0;
};

struct dunes_model {
  std::shared_ptr<State> state;
};

// The keys and values of a text, and its ids; what generate/decode.py and generate/prefix_cache.py do for one row.
struct dunes_text {
  dunes_text(std::shared_ptr<State> owner, std::vector<int64_t> prompt, int64_t max_tokens, const dunes_sampling &options)
      : model(std::move(owner)), ids(std::move(prompt)), sampling(options), prompted(ids.size()) {
    check();
    int64_t most = std::min<int64_t>(max_tokens, INT32_MAX);
    end = static_cast<int64_t>(prompted) + most;
    capacity = std::min(model->context_length, std::max(end, MIN_CAPACITY));
    rolls = model->window > 0 && model->window < capacity;
    if (rolls) capacity = model->rolling;
    for (auto &layer : model->folder.card.at("cache").items) {
      auto heads = layer.at("heads").number(), dim = layer.at("dim").number();
      auto options = at::TensorOptions(dtype(layer.at("dtype").text));
      (layer.at("part").text == "key" ? keys : values).push_back(at::zeros({1, heads, capacity + 1, dim}, options));
    }
    numbers = at::arange(2 * (capacity + model->few_tokens));
    random = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  }

  int64_t next() {
    if (static_cast<int64_t>(ids.size()) >= end) return DUNES_END;
    check_stack();
    int64_t id = choose();
    if (std::count(model->stops.begin(), model->stops.end(), id)) {
      end = static_cast<int64_t>(ids.size());
      return DUNES_END;
    }
    ids.push_back(id);
    return id;
  }

 private:
  void check() const {
    if (ids.empty()) fail("a prompt has no ids; give it at least the end token");
    for (auto id : ids)
      if (id < 0 || id >= model->embedded)
        fail("the prompt has id " + std::to_string(id) + "; the model has ids 0 to " + std::to_string(model->embedded - 1));
#define REQUIRE(type, name, option, low, high, expected) \
    if (!(sampling.name >= low && sampling.name <= high)) fail("sampling: " #name " is " + std::to_string(sampling.name) + "; expected " expected);
    DUNES_RULES(REQUIRE)
  }

  // The text goes on from its last half when it reaches the context length.
  void limit_to_context() {
    auto length = static_cast<int64_t>(ids.size()), context = model->context_length;
    if (length - start <= context) return;
    start = length - (ids.size() > prompted ? std::max<int64_t>(1, context / 2) : context);
    held = 0;
  }

  int64_t choose() {
    limit_to_context();
    auto text = ids.data() + start;
    int64_t length = static_cast<int64_t>(ids.size()) - start, row = 0;
    std::vector<Tensor> outputs;
    while (held < length) {
      bool whole = !held && model->text && !rolls && length > 4 * model->few_tokens;
      int64_t count = whole ? length : std::min(length - held, most());
      outputs = whole ? run(*model->text, {at::from_blob(text, {length}, at::kLong)}) : step(text + held, count);
      held += count;
      row = whole ? 0 : count - 1;
    }
    auto summary = outputs.at(1)[row];
    auto values = summary.const_data_ptr<double>();
    if (std::isnan(values[2])) fail("the model's logits are no numbers");
    if (sampling.temperature == 0 && values[0] < static_cast<double>(model->vocabulary)) return static_cast<int64_t>(values[0]);
    return sample(outputs[0][row].narrow(0, 0, model->vocabulary));
  }

  int64_t most() const { return !rolls && held + model->few_tokens <= capacity ? model->few_tokens : 1; }

  std::vector<Tensor> step(const int64_t *text, int64_t count) {
    if (rolls) {
      // Slots behind the first token's are not yet written: their positions are before any window.
      int64_t readable = std::min(std::max<int64_t>(held + 1, 2), capacity);
      auto positions = held - (held - numbers.narrow(0, 0, readable)).remainder(capacity);
      return run(*model->one, {at::scalar_tensor(*text, at::kLong).reshape({1}),
                               at::scalar_tensor(held % capacity, at::kLong).reshape({1}), positions});
    }
    int64_t n = count == 1 && held ? 1 : model->few_tokens;
    auto padded = at::empty({n}, at::kLong);
    for (int64_t i = 0; i < n; i++) padded.mutable_data_ptr<int64_t>()[i] = text[std::min(i, count - 1)];
    return run(n == 1 ? *model->one : *model->few, {padded, numbers.narrow(0, held, n), numbers.narrow(0, 0, held + n)});
  }

  std::vector<Tensor> run(Runner &runner, std::vector<Tensor> inputs) {
    inputs.insert(inputs.end(), keys.begin(), keys.end());
    inputs.insert(inputs.end(), values.begin(), values.end());
    return runner.run(inputs);
  }

  // The draw of generate/sampling.py.
  int64_t sample(Tensor logits) {
    if (sampling.temperature == 0) return logits.argmax(-1).item<int64_t>();
#define APPLY(type, name, ...) if (sampling.name != 0) logits = name(sampling.name, logits);
    DUNES_RULES(APPLY)
    auto sums = logits.softmax(-1).cumsum(-1, at::kDouble), all = sums[-1];
    if (!(all.item<double>() > 0)) fail("no id can be drawn, since the logits have NaN or exclude all ids");
    auto point = at::rand({}, random, at::kDouble) * all;
    return at::minimum(at::searchsorted(sums, point, false, true), at::searchsorted(sums, all)).item<int64_t>();
  }

  std::shared_ptr<State> model;
  std::vector<int64_t> ids;
  dunes_sampling sampling;
  size_t prompted;
  int64_t end = 0, capacity = 0, start = 0, held = 0;
  bool rolls = false;
  std::vector<Tensor> keys, values;
  Tensor numbers;
  at::Generator random;
};

namespace {

const State &generating(const dunes_model *model) {
  if (!model || !model->state->generates) fail("this folder holds a network that generates no text");
  return *model->state;
}

const State &network(const dunes_model *model) {
  if (!model || model->state->generates) fail("this folder holds a model that generates text");
  return *model->state;
}

}  // namespace

const char *dunes_error(void) { return last_error.c_str(); }

void dunes_set_threads(int threads) { at::set_num_threads(std::max(1, threads)); }

dunes_model *dunes_open(const char *folder) {
  return attempt(static_cast<dunes_model *>(nullptr), [&] {
    check_stack();
    return new dunes_model{std::make_shared<State>(folder)};
  });
}

void dunes_close(dunes_model *model) { delete model; }

int dunes_generates(const dunes_model *model) { return model->state->generates; }

const char *dunes_no_tokenizer(const dunes_model *model) {
  return attempt("", [&] { return generating(model).folder.card.at("no_tokenizer").text.c_str(); });
}

int64_t dunes_prompt(const dunes_model *model, const char *text, int64_t bytes, int64_t *ids, int64_t capacity) {
  return attempt<>(int64_t{DUNES_ERROR}, [&] {
    auto &state = generating(model);
    auto &card = state.folder.card;
    if (!state.tokenizer) fail(card.at("no_tokenizer").text);
    auto all = card.at(bytes ? "bos" : "empty").numbers();
    auto rest = state.tokenizer->encode(std::string(text, static_cast<size_t>(bytes)));
    all.insert(all.end(), rest.begin(), rest.end());
    std::copy_n(all.begin(), std::min<int64_t>(capacity, static_cast<int64_t>(all.size())), ids);
    return static_cast<int64_t>(all.size());
  });
}

const char *dunes_token(const dunes_model *model, int64_t id, int64_t *bytes) {
  return attempt(static_cast<const char *>(nullptr), [&] {
    auto &state = generating(model);
    if (!state.tokenizer) fail(state.folder.card.at("no_tokenizer").text);
    auto &token = state.tokenizer->token(id);
    *bytes = static_cast<int64_t>(token.size());
    return token.data();
  });
}

dunes_text *dunes_start(dunes_model *model, const int64_t *prompt, int64_t count, int64_t max_tokens, const dunes_sampling *sampling) {
  return attempt(static_cast<dunes_text *>(nullptr), [&] {
    generating(model);
    if (count < 0 || max_tokens < 0) fail("a prompt and max_tokens have at least 0 ids");
    return new dunes_text(model->state, {prompt, prompt + count}, max_tokens, sampling ? *sampling : dunes_sampling{});
  });
}

int64_t dunes_next(dunes_text *text) {
  return attempt(int64_t{DUNES_ERROR}, [&] { return text->next(); });
}

void dunes_free(dunes_text *text) { delete text; }

int dunes_sizes(const dunes_model *model, int64_t *inputs, int64_t *outputs, int64_t *rows, int64_t *columns) {
  return attempt(DUNES_ERROR, [&] {
    auto &state = network(model);
    auto &shape = state.input;
    *inputs = c10::multiply_integers(shape), *outputs = c10::multiply_integers(state.output);
    *rows = shape.size() > 1 ? shape[shape.size() - 2] : 1, *columns = shape.empty() ? 1 : shape.back();
    return 0;
  });
}

int dunes_run(dunes_model *model, const float *input, float *output) {
  return attempt(DUNES_ERROR, [&] {
    check_stack();
    auto &state = network(model);
    auto given = at::from_blob(const_cast<float *>(input), state.input, at::kFloat);
    auto result = state.one->run({given}).at(0).to(at::kFloat).contiguous();
    std::copy_n(result.const_data_ptr<float>(), result.numel(), output);
    return 0;
  });
}
