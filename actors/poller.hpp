// The poller actor: a thread of its own around a PollerCore. The only thread that touches its ports.
#pragma once

#include <memory>

#include <kvferry/actors/caf.hpp>

namespace kvferry {

/// Detached and blocking: the mailbox is looked at between rounds, and the thread sleeps in one
/// epoll_wait over its ports' descriptors and the doorbell, which enqueue() and submitters ring.
class PollerActor final : public caf::blocking_actor {
 public:
  PollerActor(caf::actor_config& config, std::unique_ptr<PollerCore> core, std::shared_ptr<Submissions> submissions,
              Duration spin);
  ~PollerActor() override;

  void enqueue(caf::mailbox_element_ptr element, caf::execution_unit* unit) override;
  void act() override;

 private:
  void receive_some();
  void watch_descriptors();
  void sleep_until(TimePoint until);
  void drain_until_idle();

  std::unique_ptr<PollerCore> core_;
  std::shared_ptr<Submissions> submissions_;
  const Duration spin_;
  int epoll_ = -1;
  bool stopping_ = false;
};

/// Tells the scheduler what a poller reports.
class ReportToScheduler final : public PollerEvents {
 public:
  ReportToScheduler(caf::actor scheduler, std::uint32_t group) : scheduler_(std::move(scheduler)), group_(group) {}
  void rail_up(std::uint32_t peer, std::uint32_t rail) override;
  void rail_down(std::uint32_t peer, std::uint32_t rail, const Status& why) override;
  void request(const PortRequest& request) override;
  void orphaned(RefPtr<TransferState> transfer, const Status& why) override;

 private:
  caf::actor scheduler_;
  std::uint32_t group_;
};

}  // namespace kvferry
