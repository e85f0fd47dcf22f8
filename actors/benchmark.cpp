#include <atomic>
#include <future>
#include <utility>

#include <sys/prctl.h>

#include <kvferry/actors/benchmark.hpp>
#include <kvferry/actors/caf.hpp>

namespace kvferry {
namespace {

struct StopBenchmark {};

/// What the actor and the handle share.
struct BenchmarkState {
  std::promise<Status> outcome;
  std::atomic<std::uint64_t> steps{0};
};

}  // namespace
}  // namespace kvferry

CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::StopBenchmark)

namespace kvferry {
namespace {

class BenchmarkActor final : public caf::blocking_actor {
 public:
  BenchmarkActor(caf::actor_config& config, BenchmarkJob* job, std::shared_ptr<BenchmarkState> state)
      : caf::blocking_actor(config), job_(job), state_(std::move(state)) {}

  void act() override {
    ::prctl(PR_SET_NAME, "kvferry-bench");
    state_->outcome.set_value(run());
  }

 private:
  Status run() {
    for (;;) {
      bool stopped = false;
      while (!mailbox().empty())
        receive([&](StopBenchmark) { stopped = true; },
                caf::others >>
                    [](caf::message_view&) -> caf::result<caf::message> { return caf::sec::unexpected_message; });
      if (stopped) return {Errc::cancelled, "the benchmark was stopped"};
      const auto more = job_->step();
      if (!more) return more.status();
      state_->steps.fetch_add(1, std::memory_order_relaxed);
      if (!*more) return {};
    }
  }

  BenchmarkJob* job_;
  std::shared_ptr<BenchmarkState> state_;
};

}  // namespace

class BenchmarkActorHandle::Impl {
 public:
  explicit Impl(BenchmarkJob& job)
      : state_(std::make_shared<BenchmarkState>()), outcome_(state_->outcome.get_future()) {
    config_.set("scheduler.max-threads", std::size_t{1});
    system_ = std::make_unique<caf::actor_system>(config_);
    actor_ = system_->spawn<BenchmarkActor, caf::detached>(&job, state_);
  }
  ~Impl() {
    stop();
    outcome_.wait();
    actor_ = nullptr;
    system_.reset();
  }

  void stop() { caf::anon_send(actor_, StopBenchmark{}); }
  Status wait(Duration limit) {
    if (outcome_.wait_for(limit) != std::future_status::ready) return {Errc::timed_out, "the benchmark still runs"};
    return outcome_.get();
  }
  std::uint64_t steps() const { return state_->steps.load(std::memory_order_relaxed); }

 private:
  std::shared_ptr<BenchmarkState> state_;
  std::shared_future<Status> outcome_;
  caf::actor_system_config config_;
  std::unique_ptr<caf::actor_system> system_;
  caf::actor actor_;
};

BenchmarkActorHandle::BenchmarkActorHandle(BenchmarkJob& job) : impl_(std::make_unique<Impl>(job)) {}
BenchmarkActorHandle::~BenchmarkActorHandle() = default;
void BenchmarkActorHandle::stop() { impl_->stop(); }
Status BenchmarkActorHandle::wait(Duration limit) { return impl_->wait(limit); }
std::uint64_t BenchmarkActorHandle::steps() const { return impl_->steps(); }

}  // namespace kvferry
