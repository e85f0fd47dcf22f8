// What a port's items came to and its poller has not been told yet.
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <kvferry/transports/transport.hpp>

namespace kvferry {

/// First in, first out, in one stretch of memory that is used again. One thread.
class CompletionList {
 public:
  void reserve(std::size_t count) { completions_.reserve(count); }
  void push_back(Completion completion) { completions_.push_back(std::move(completion)); }
  bool empty() const noexcept { return completions_.empty(); }

  /// Moves as many as fit into `to`; returns how many.
  std::size_t hand_over(std::span<Completion> to) {
    std::size_t count = 0;
    while (count < to.size() && taken_ < completions_.size()) to[count++] = std::move(completions_[taken_++]);
    if (taken_ == completions_.size()) {
      completions_.clear();
      taken_ = 0;
    }
    return count;
  }

 private:
  std::vector<Completion> completions_;
  std::size_t taken_ = 0;
};

}  // namespace kvferry
