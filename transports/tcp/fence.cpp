#include "fence.hpp"

#include <algorithm>
#include <chrono>

#include <fmt/format.h>

namespace kvferry::tcp {
namespace {

using namespace std::chrono_literals;

constexpr Duration retry_interval = 20ms;

}  // namespace

class Fence::Socket final : public ClientSocket {
 public:
  Socket(Fence& fence, Loop& loop, Fd fd, const Hello& hello, std::string peer)
      : ClientSocket(loop, std::move(fd), hello, std::move(peer)), fence_(fence) {}

 protected:
  void on_open() override {
    abort();
    fence_.on_answer();
  }
  void on_failed(Failure failure, const Status& /*why*/) override { fence_.on_failed(failure); }
  bool on_open_part() override { return false; }
  void on_sent(Outgoing& /*message*/) override {}

 private:
  Fence& fence_;
};

Fence::Fence(Loop& loop, const TcpConfig& config, const Endpoint& peer, const Hello& hello, Status why,
             std::vector<std::uint64_t> cookies, TimePoint limit)
    : loop_(loop),
      config_(config),
      peer_(peer),
      hello_(hello),
      why_(std::move(why)),
      cookies_(std::move(cookies)),
      limit_(limit) {
  ask();
}

Fence::~Fence() { hang_up(); }

void Fence::ask() {
  ask_again_ = TimePoint::max();
  Result<Fd> fd = begin_connect(peer_, config_);
  if (fd) {
    socket_ = std::make_unique<Socket>(*this, loop_, std::move(*fd), hello_, peer_.text());
    if (socket_->watch()) return;
  }
  on_failed(ClientSocket::Failure::broken);
}

void Fence::on_answer() { settled_ = confirmed_ = true; }

// A target that refuses is another one than the channel's: it restarted, and its connections are gone.
void Fence::on_failed(ClientSocket::Failure failure) {
  if (failure != ClientSocket::Failure::broken) return on_answer();
  ask_again_ = Clock::now() + retry_interval;
}

void Fence::hang_up() noexcept {
  if (!socket_) return;
  socket_->abort();
  loop_.bury(std::move(socket_));
}

void Fence::run_timers(TimePoint now) {
  if (settled_) return;
  if (now >= limit_) {
    settled_ = true;
  } else if (now >= ask_again_) {
    hang_up();
    ask();
  }
}

TimePoint Fence::next_wakeup() const noexcept { return std::min(limit_, ask_again_); }

Status Fence::outcome() const {
  if (confirmed_) return why_;
  return {why_.code(), fmt::format("{} (the target did not confirm that it applies nothing more: bytes that were sent "
                                   "may still land there)",
                                   why_.text())};
}

}  // namespace kvferry::tcp
