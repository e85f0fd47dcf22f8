#include "answer.hpp"

namespace kvferry::tcp {
namespace {

// Beyond this many, answers that come back are freed: a burst must not keep its memory for ever.
constexpr std::size_t most_kept = 256;

}  // namespace

void Answer::respond(std::uint32_t id, const Status& status, std::uint64_t payload_bytes) {
  text = status.text().substr(0, max_text_bytes);
  touches_region = payload_bytes > 0;
  if (payload_bytes == 0) parts.resize(1);
  if (!text.empty()) parts.push_back({text.data(), text.size()});
  encode(Response{id, status.code(), static_cast<std::uint16_t>(text.size()), payload_bytes}, header.data());
  parts[0] = {header.data(), header.size()};
  at = parts.data();
  end = parts.data() + parts.size();
}

Answer& AnswerPool::take() {
  ++in_use_;
  if (free_.empty()) return *new Answer;
  Answer* answer = free_.back().release();
  free_.pop_back();
  return *answer;
}

void AnswerPool::give(Answer& answer) {
  --in_use_;
  std::unique_ptr<Answer> owned(&answer);
  answer.touches_region = false;
  if (free_.size() < most_kept) free_.push_back(std::move(owned));
}

}  // namespace kvferry::tcp
