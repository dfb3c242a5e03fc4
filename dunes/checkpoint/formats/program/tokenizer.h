// Between text and ids, as the tokenizers that are trained here do it: bytes, byte pairs and characters.
#pragma once

#include <map>
#include <queue>
#include <string>
#include <unordered_map>
#include <vector>

#include "folder.h"

namespace dunes {

class Tokenizer {
 public:
  explicit Tokenizer(const Tensors &tables) {
    auto bytes = table(tables, "bytes", at::kByte), ends = table(tables, "ends", at::kLong);
    auto first = table(tables, "first", at::kLong), merges = table(tables, "merges", at::kLong);
    const char *data = reinterpret_cast<const char *>(bytes.const_data_ptr<uint8_t>());
    for (int64_t i = 0, begin = 0; i < ends.numel(); begin = ends.const_data_ptr<int64_t>()[i++]) {
      int64_t end = ends.const_data_ptr<int64_t>()[i];
      if (end < begin || end > bytes.numel()) fail("has tokens beyond its end");
      tokens_.emplace_back(data + begin, static_cast<size_t>(end - begin));
    }
    for (int64_t i = 0; i < first.numel() / 2; i++) {
      auto row = first.const_data_ptr<int64_t>() + 2 * i;
      first_[row[0]] = row[1];
    }
    for (int64_t i = 0; i < merges.numel() / 3; i++) {
      auto row = merges.const_data_ptr<int64_t>() + 3 * i;
      merges_.emplace(std::make_pair(row[0], row[1]), Merge{i, row[2]});
    }
    characters_ = tables.count("characters") > 0;
    auto found = first_.find(UNKNOWN);
    unknown_ = found == first_.end() ? 0 : found->second;
  }

  const std::string &token(int64_t id) const {
    static const std::string none;
    return id >= 0 && id < static_cast<int64_t>(tokens_.size()) ? tokens_[static_cast<size_t>(id)] : none;
  }

  std::vector<int64_t> encode(const std::string &text) const {
    std::vector<int64_t> ids;
    for (size_t begin = 0, end = 0; begin < text.size(); begin = end) {
      std::vector<int64_t> piece;
      if (characters_) {
        end = begin + 1;
        while (end < text.size() && (text[end] & 0xC0) == 0x80) end++;
        piece = {first(character(text.substr(begin, end - begin)))};
      } else {
        end = piece_end(text, begin);
        for (size_t i = begin; i < end; i++) piece.push_back(first(static_cast<uint8_t>(text[i])));
        piece = merged(piece);
      }
      ids.insert(ids.end(), piece.begin(), piece.end());
    }
    return ids;
  }

 private:
  static constexpr int64_t UNKNOWN = -1;
  struct Merge {
    int64_t rank, id;
  };

  static at::Tensor table(const Tensors &tables, const std::string &name, at::ScalarType type) {
    auto found = tables.find(name);
    if (found == tables.end() || found->second.scalar_type() != type) fail("has no table of " + name);
    return found->second.contiguous();
  }

  // A line, or its end: no pair merges across it.
  static size_t piece_end(const std::string &text, size_t begin) {
    if (text.compare(begin, 2, "\r\n") == 0) return begin + 2;
    if (text[begin] == '\r' || text[begin] == '\n') return begin + 1;
    return std::min(text.find_first_of("\r\n", begin), text.size());
  }

  // The bytes of a character as one number.
  static int64_t character(const std::string &bytes) {
    int64_t number = 0;
    for (size_t i = 0; i < bytes.size() && i < 5; i++) number = number << 8 | static_cast<uint8_t>(bytes[i]);
    return number;
  }

  int64_t first(int64_t character) const {
    auto found = first_.find(character);
    return found == first_.end() ? unknown_ : found->second;
  }

  // The pair that was learned first is merged first, of equal ones the leftmost.
  std::vector<int64_t> merged(std::vector<int64_t> ids) const {
    struct Pair {
      int64_t rank;
      size_t left, right;
      int64_t ids[2];
      bool operator<(const Pair &other) const {  // the queue's top is the largest
        return rank != other.rank ? rank > other.rank : left > other.left;
      }
    };
    constexpr int64_t GONE = -1;
    std::vector<size_t> before(ids.size()), after(ids.size());
    std::priority_queue<Pair> pairs;
    auto offer = [&](size_t left, size_t right) {
      auto merge = merges_.find({ids[left], ids[right]});
      if (merge != merges_.end()) pairs.push({merge->second.rank, left, right, {ids[left], ids[right]}});
    };
    for (size_t i = 0; i < ids.size(); i++) {
      before[i] = i - 1, after[i] = i + 1;
      if (i) offer(i - 1, i);
    }
    for (; !pairs.empty();) {
      Pair pair = pairs.top();
      pairs.pop();
      if (ids[pair.left] != pair.ids[0] || ids[pair.right] != pair.ids[1] || after[pair.left] != pair.right) continue;
      ids[pair.left] = merges_.at({pair.ids[0], pair.ids[1]}).id;
      ids[pair.right] = GONE;
      after[pair.left] = after[pair.right];
      if (after[pair.left] < ids.size()) before[after[pair.left]] = pair.left, offer(pair.left, after[pair.left]);
      if (pair.left) offer(before[pair.left], pair.left);
    }
    std::vector<int64_t> result;
    for (size_t i = 0; i < ids.size(); i = after[i]) result.push_back(ids[i]);
    return result;
  }

  std::vector<std::string> tokens_;
  std::unordered_map<int64_t, int64_t> first_;
  std::map<std::pair<int64_t, int64_t>, Merge> merges_;
  bool characters_ = false;
  int64_t unknown_ = 0;
};

}  // namespace dunes
