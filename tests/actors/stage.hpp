// A stage for actors: CAF's deterministic scheduler runs messages one after the other when the test
// says so, its clock moves only when the test moves it, and probes stand in for an actor's partners.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include <caf/scheduler/test_coordinator.hpp>

#include <kvferry/actors/caf.hpp>

namespace kvferry::test {

class Stage {
 public:
  Stage() : system_(configured(config_)), coordinator_(dynamic_cast<Coordinator&>(system_.scheduler())) {
    coordinator_.clock().current_time += std::chrono::hours(1);
  }
  ~Stage() {
    for (const auto& actor : actors_) caf::anon_send_exit(actor, caf::exit_reason::kill);
    run();
    actors_.clear();
    coordinator_.clock().cancel_all();
  }
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

  template <class Actor, class... Arguments>
  caf::actor spawn(Arguments&&... arguments) {
    actors_.push_back(system_.spawn<Actor>(std::forward<Arguments>(arguments)...));
    return actors_.back();
  }

  TimePoint now() { return coordinator_.clock().now(); }
  /// Until every mailbox is empty.
  void run() { coordinator_.run(); }
  template <class Message>
  void send(const caf::actor& to, Message message) {
    caf::anon_send(to, std::move(message));
    run();
  }
  /// In steps, so that what a timer sets off happens at about its own time.
  void advance(Duration time) {
    constexpr Duration step = std::chrono::milliseconds(10);
    for (; time > Duration::zero(); time -= step) {
      coordinator_.advance_time(std::min(time, step));
      run();
    }
  }
  void kill(const caf::actor& actor) {
    caf::anon_send_exit(actor, caf::exit_reason::kill);
    run();
  }

 private:
  using Coordinator = caf::scheduler::test_coordinator;

  static caf::actor_system_config& configured(caf::actor_system_config& config) {
    config.set("scheduler.policy", caf::atom("testing"));
    return config;
  }

  caf::actor_system_config config_;
  caf::actor_system system_;
  Coordinator& coordinator_;
  std::vector<caf::actor> actors_;
};

/// Messages that a probe has received, in order.
template <class... Messages>
class Received {
 public:
  using Any = std::variant<Messages...>;

  void add(Any message) { all_.push_back(std::move(message)); }
  const std::vector<Any>& all() const { return all_; }
  void clear() { all_.clear(); }
  template <class Message>
  std::vector<Message> of() const {
    std::vector<Message> found;
    for (const Any& any : all_)
      if (const auto* message = std::get_if<Message>(&any)) found.push_back(*message);
    return found;
  }

 private:
  std::vector<Any> all_;
};

/// Keeps what it is sent and answers nothing.
template <class... Messages>
class Probe final : public caf::event_based_actor {
 public:
  using Log = Received<Messages...>;

  Probe(caf::actor_config& config, std::shared_ptr<Log> log) : caf::event_based_actor(config), log_(std::move(log)) {}
  caf::behavior make_behavior() override { return {keeper<Messages>()...}; }

 private:
  template <class Message>
  auto keeper() {
    return [this](const Message& message) { log_->add(message); };
  }

  std::shared_ptr<Log> log_;
};

}  // namespace kvferry::test
