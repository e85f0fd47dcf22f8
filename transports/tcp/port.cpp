#include "port.hpp"

#include <algorithm>

namespace kvferry::tcp {

TcpPort::TcpPort(const TcpConfig& config, const PortContext& context, PortEvents& events)
    : config_(config),
      events_(events),
      server_(loop_, context, events),
      initiator_(loop_, config_, context.fence_limit) {}

Result<std::unique_ptr<Port>> TcpPort::open(const TcpConfig& config, const PortContext& context, PortEvents& events) {
  auto port = std::make_unique<TcpPort>(config, context, events);
  if (Status status = port->loop_.open(); !status) return status;
  if (Status status = port->server_.listen(config); !status) return status;
  return std::unique_ptr<Port>(std::move(port));
}

std::size_t TcpPort::poll(std::span<Completion> completions) {
  if (initiator_.has_timers() || server_.has_timers()) {
    const TimePoint now = Clock::now();
    initiator_.run_timers(now);
    server_.run_timers(now);
  }
  server_.retry_stalled();
  loop_.turn();
  initiator_.deliver_events(events_);
  return initiator_.take_completions(completions);
}

Progress TcpPort::progress() const {
  if (loop_.has_work() || initiator_.has_news()) return Progress::runnable;
  return initiator_.busy() || server_.busy() ? Progress::waiting : Progress::idle;
}

TimePoint TcpPort::next_wakeup() const { return std::min(initiator_.next_wakeup(), server_.next_wakeup()); }

}  // namespace kvferry::tcp
