#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include <fmt/format.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <kvferry/actors/poller.hpp>
#include <kvferry/runtime/log.hpp>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvferry {
namespace {

constexpr int messages_per_round = 16;
constexpr auto pure_spin = std::chrono::microseconds(5);
// Ending an engine takes at most a second; fences have ended everything well before.
constexpr auto drain_limit = std::chrono::milliseconds(800);

void relax() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

PollerActor::PollerActor(caf::actor_config& config, std::unique_ptr<PollerCore> core,
                         std::shared_ptr<Submissions> submissions, Duration spin)
    : caf::blocking_actor(config), core_(std::move(core)), submissions_(std::move(submissions)), spin_(spin) {}

PollerActor::~PollerActor() {
  if (epoll_ >= 0) ::close(epoll_);
}

void PollerActor::enqueue(caf::mailbox_element_ptr element, caf::execution_unit* unit) {
  caf::blocking_actor::enqueue(std::move(element), unit);
  submissions_->ring();
}

void PollerActor::act() {
  ::prctl(PR_SET_NAME, "kvferry-poller");
  watch_descriptors();
  TimePoint last_active;
  bool runnable = true;
  while (!stopping_) {
    receive_some();
    // Told to stop, it must not sleep once more.
    if (stopping_) break;
    const TimePoint now = Clock::now();
    // The end of the last round that had work, not its beginning: one round may send for longer than spin_.
    if (runnable) last_active = now;
    runnable = core_->step(now) == Progress::runnable;
    if (runnable) continue;
    if (now - last_active < spin_) {
      // Past the first moments another thread may need this core more, perhaps the very peer that is
      // to answer.
      if (now - last_active < pure_spin)
        relax();
      else
        ::sched_yield();
      continue;
    }
    sleep_until(core_->next_wakeup());
    runnable = true;
  }
  drain_until_idle();
  core_.reset();
}

void PollerActor::receive_some() {
  for (int i = 0; i < messages_per_round && !mailbox().empty(); ++i) {
    receive(
        [this](const OpenRail& open) { core_->open_rail(open.peer, open.spec); },
        [this](const ClosePeer& close) { core_->close_peer(close.peer, close.why); },
        [this](const ReleaseRegion& release) {
          core_->release_region(release.region, Clock::now(), [done = release.done] { done->set_value(); });
        },
        [this](const AnswerPort& given) { core_->on_answer(given.transport, given.channel, given.answer); },
        [this](const ServePort& asked) { asked.answer(core_->serve(asked.transport, asked.address, asked.request)); },
        [this](const DropSession& drop) { core_->drop_session(drop.session); },
        [this](const StopPoller& stop) {
          stopping_ = true;
          core_->stop(stop.why);
        },
        caf::others >> [](caf::message_view&) -> caf::result<caf::message> { return caf::sec::unexpected_message; });
  }
}

void PollerActor::watch_descriptors() {
  epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  auto fds = core_->wait_fds();
  fds.push_back(submissions_->wake_fd());
  for (const int fd : fds) {
    if (fd < 0) continue;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0)
      log(LogLevel::error, fmt::format("epoll_ctl failed with errno {}: this poller will wake late", errno));
  }
}

void PollerActor::sleep_until(TimePoint until) {
  submissions_->begin_sleep();
  if (submissions_->empty() && mailbox().empty()) {
    using std::chrono::milliseconds;
    const Duration left = until - Clock::now();
    // Rounded up, so that a wake-up is never just too early.
    const auto limit = std::clamp<std::int64_t>(
        std::chrono::ceil<milliseconds>(std::min<Duration>(left, std::chrono::seconds(10))).count(), 0, 10000);
    std::array<epoll_event, 8> events;
    ::epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), static_cast<int>(limit));
  }
  submissions_->end_sleep();
}

void PollerActor::drain_until_idle() {
  const TimePoint limit = Clock::now() + drain_limit;
  while (!core_->idle() && Clock::now() < limit) {
    receive_some();
    if (core_->step(Clock::now()) != Progress::runnable)
      sleep_until(std::min(core_->next_wakeup(), Clock::now() + std::chrono::milliseconds(5)));
  }
}

void ReportToScheduler::rail_up(std::uint32_t peer, std::uint32_t rail) {
  caf::anon_send(scheduler_, RailReport{group_, peer, rail, true, {}});
}

void ReportToScheduler::rail_down(std::uint32_t peer, std::uint32_t rail, const Status& why) {
  caf::anon_send(scheduler_, RailReport{group_, peer, rail, false, why});
}

void ReportToScheduler::request(const PortRequest& request) { caf::anon_send(scheduler_, AskPort{group_, request}); }

void ReportToScheduler::orphaned(RefPtr<TransferState> transfer, const Status& why) {
  caf::anon_send(scheduler_, Orphan{group_, std::move(transfer), why});
}

}  // namespace kvferry
