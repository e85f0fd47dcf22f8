#include <algorithm>
#include <string>

#include <kvferry/runtime/transfer.hpp>
#include <kvferry/runtime/transfer_state.hpp>

namespace kvferry {

namespace {

// An engine ends every transfer by its deadline and the drain that follows; a wait that outlasts
// this much more would be a defect, which must show as an error and not as a hang.
constexpr Duration wait_reserve = std::chrono::seconds(10);

TimePoint saturated(TimePoint from, Duration distance) noexcept {
  return distance >= TimePoint::max() - from ? TimePoint::max() : from + distance;
}

Status empty_handle() { return {Errc::invalid_argument, "the transfer handle is empty"}; }

}  // namespace

std::string_view to_string(Op op) noexcept {
  switch (op) {
    case Op::read:
      return "read";
    case Op::write:
      return "write";
    case Op::write_imm:
      return "write_imm";
    case Op::send:
      return "send";
    case Op::recv:
      return "recv";
  }
  return "unknown operation";
}

Transfer::Transfer() = default;
Transfer::Transfer(RefPtr<TransferState> state) : state_(std::move(state)) {}
Transfer::Transfer(const Transfer&) = default;
Transfer::Transfer(Transfer&&) noexcept = default;
Transfer& Transfer::operator=(const Transfer&) = default;
Transfer& Transfer::operator=(Transfer&&) noexcept = default;
Transfer::~Transfer() = default;

Transfer Transfer::ended(Status status) {
  RefPtr<TransferState> state = TransferState::create({});
  state->complete(std::move(status));
  return Transfer(std::move(state));
}

bool Transfer::done() const noexcept { return !state_ || state_->done(); }

Status Transfer::status() const {
  if (!state_) return empty_handle();
  if (!state_->done()) return {Errc::invalid_argument, "the transfer still runs: wait for it before asking its status"};
  return state_->status();
}

std::uint64_t Transfer::bytes() const noexcept { return state_ ? state_->bytes() : 0; }

Status Transfer::wait() const {
  if (!state_) return empty_handle();
  if (!state_->wait_until(saturated(state_->deadline(), wait_reserve), state_->wait_spin()))
    return {Errc::internal, std::string("the engine did not end this ") + std::string(to_string(state_->op())) +
                                " within 10 s after its deadline; its memory may still move. Please report"};
  return state_->status();
}

bool Transfer::wait_for(Duration limit) const {
  return !state_ || state_->wait_until(saturated(Clock::now(), std::max(limit, Duration::zero())), state_->wait_spin());
}

void Transfer::cancel() const {
  if (state_) state_->cancel();
}

void Transfer::on_complete(std::function<void(const Status&)> callback, Dispatch where) const {
  if (state_) {
    state_->on_complete(std::move(callback), where);
  } else {
    callback(empty_handle());
  }
}

}  // namespace kvferry
