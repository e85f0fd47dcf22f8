#include "bench/target.hpp"

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include <fmt/core.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <kvferry/runtime/log.hpp>
#include <kvferry/transports/transport.hpp>

#include "bench/control.hpp"
#include "bench/data_check.hpp"
#include "bench/floor_service.hpp"
#include "bench/notification_log.hpp"

namespace kvferry::bench {
namespace {

using namespace std::chrono_literals;

/// How often a waiting session looks whether it should stop.
constexpr auto look_interval = 500ms;

/// Echoes on their way back before the oldest is waited for.
constexpr std::size_t echoes_in_flight = 64;

constexpr std::size_t max_floors = 16;

/// One initiator: answers its questions, in order, on a thread of its own.
class Session {
 public:
  Session(Engine& engine, NotificationLog& notifications, Peer incoming, const std::atomic<bool>& stop)
      : engine_(engine), notifications_(notifications), incoming_(std::move(incoming)), stop_(stop) {
    thread_ = std::thread([this] {
      run();
      ended_ = true;
    });
  }
  ~Session() { thread_.join(); }

  bool ended() const { return ended_; }
  const Peer& peer() const { return incoming_; }

 private:
  using Handler = Result<Json> (Session::*)(const Json&);

  void run() {
    if (auto status = greet(); !status) {
      if (!stop_) log(LogLevel::warning, fmt::format("{}: {}", incoming_.name(), status.to_string()));
    } else {
      while (answer_next()) {
      }
    }
    floors_.clear();
    if (region_) {
      if (auto status = engine_.unregister_region(region_); !status) log(LogLevel::warning, status.to_string());
    }
  }

  Status greet() {
    std::vector<std::byte> buffer(max_message_bytes);
    const Transfer transfer = engine_.recv(incoming_, buffer, {.deadline = 10s});
    if (auto status = transfer.wait(); !status) return status;
    auto hello = decode(std::span(buffer).first(transfer.bytes()));
    if (!hello) return hello.status();
    if (number_field(*hello, "version") != std::uint64_t{control_version}) {
      return {Errc::version_mismatch, "the initiator is a transfer_bench of another version"};
    }
    auto outgoing = engine_.connect(text_field(*hello, "address"));
    if (!outgoing) return outgoing.status().with_context("connecting back");
    conversation_.emplace(engine_, *outgoing, incoming_);
    return conversation_->send({{"id", 0}, {"ok", true}});
  }

  bool answer_next() {
    auto request = conversation_->receive(look_interval);
    if (!request) return request.status() == Errc::timed_out && !stop_;
    auto answer = handle(*request);
    Json reply = answer ? std::move(*answer) : Json{{"error", answer.status().to_string()}};
    reply["ok"] = answer.is_ok();
    reply["id"] = number_field(*request, "id").value_or(0);
    if (!conversation_->send(reply)) return false;
    if (echo_next_ && !echo()) return false;
    return !over_;
  }

  Result<Json> handle(const Json& request) {
    static const std::map<std::string, Handler> handlers = {
        {"prepare", &Session::prepare},
        {"fill", &Session::fill},
        {"poison", &Session::poison},
        {"fill_pool", &Session::fill_pool},
        {"verify", &Session::verify},
        {"reset_notifications", &Session::reset_notifications},
        {"verify_notifications", &Session::verify_notifications},
        {"echo", &Session::start_echo},
        {"open_floor", &Session::open_floor},
        {"close_floor", &Session::close_floor},
        {"bye", &Session::bye},
    };
    const auto found = handlers.find(text_field(request, "type"));
    if (found != handlers.end()) return (this->*found->second)(request);
    return Status(Errc::unsupported, fmt::format("'{}' is no request of transfer_bench", text_field(request, "type")));
  }

  Result<Json> prepare(const Json& request) {
    const auto bytes = number_field(request, "bytes");
    if (!bytes || *bytes == 0) return Status(Errc::malformed, "prepare without a size");
    if (!region_ || region_.size() < *bytes) {
      floors_.clear();
      if (region_) {
        if (auto status = engine_.unregister_region(region_); !status) return status;
        region_ = {};
      }
      const std::string name = fmt::format("bench/{}/{:x}", incoming_.name(), incoming_.incarnation());
      auto region = engine_.allocate(name, *bytes);
      if (!region) return region.status();
      region_ = *region;
    }
    Json answer = {{"region", region_.name()}, {"pid", static_cast<std::uint64_t>(::getpid())}};
    if (region_.record()->memfd >= 0) answer["memfd"] = static_cast<std::uint64_t>(region_.record()->memfd);
    return answer;
  }

  /// The workload of a request, which must fit into the region.
  Result<Workload> fitting_workload(const Json& request) {
    auto workload = workload_from(request.value("workload", Json()));
    if (!workload) return workload;
    if (region_ && workload->region_bytes() <= region_.size()) return workload;
    return Status(Errc::out_of_bounds, "the workload is larger than the prepared region");
  }

  Result<Json> fill(const Json& request) {
    auto workload = fitting_workload(request);
    if (!workload) return workload.status();
    fill_blocks(region_.bytes(), *workload, Side::remote, number_field(request, "round").value_or(0));
    return Json::object();
  }

  Result<Json> poison(const Json& request) {
    auto workload = fitting_workload(request);
    if (!workload) return workload.status();
    poison_region(region_.bytes(), *workload);
    return Json::object();
  }

  Result<Json> fill_pool(const Json& request) {
    const auto size = number_field(request, "block_size");
    const auto blocks = number_field(request, "blocks");
    const auto seed = number_field(request, "seed");
    if (!size || !blocks || !seed || !region_ || *size == 0 || *blocks > region_.size() / *size) {
      return Status(Errc::out_of_bounds, "the pool does not fit into the prepared region");
    }
    for (std::uint64_t i = 0; i < *blocks; ++i) {
      fill_block(region_.bytes().subspan(i * *size, *size), block_key(*seed, 0, i));
    }
    return Json::object();
  }

  Result<Json> verify(const Json& request) {
    auto workload = fitting_workload(request);
    if (!workload) return workload.status();
    const auto mismatch =
        verify_region(region_.bytes(), *workload, Side::remote, number_field(request, "round").value_or(0));
    return Json{{"mismatch", mismatch ? "at the target, " + mismatch->to_string() : ""}};
  }

  Result<Json> reset_notifications(const Json&) {
    notifications_.reset(incoming_.name());
    return Json::object();
  }

  Result<Json> verify_notifications(const Json& request) {
    return Json{{"mismatch", notifications_.check(incoming_.name(), number_field(request, "count").value_or(0))}};
  }

  Result<Json> start_echo(const Json&) {
    echo_next_ = true;
    return Json::object();
  }

  /// Sends messages back until an empty one comes. False when the initiator has gone.
  bool echo() {
    echo_next_ = false;
    std::vector<std::byte> buffer(max_message_bytes);
    std::deque<Transfer> in_flight;
    while (!stop_) {
      const Transfer received = engine_.recv(incoming_, buffer, {.deadline = look_interval});
      const Status status = received.wait();
      if (status == Errc::timed_out) continue;
      if (!status) return false;
      if (received.bytes() == 0) return true;
      in_flight.push_back(engine_.send(conversation_->outgoing(), std::span(buffer).first(received.bytes())));
      if (in_flight.size() < echoes_in_flight) continue;
      if (!in_flight.front().wait()) return false;
      in_flight.pop_front();
    }
    return false;
  }

  Result<Json> open_floor(const Json& request) {
    auto wanted = floor_request_from(request);
    if (!wanted) return wanted.status();
    if (!region_) return Status(Errc::invalid_argument, "a floor needs a prepared region");
    if (floors_.size() >= max_floors) return Status(Errc::too_large, fmt::format("{} floors are open", max_floors));
    auto server = make_floor_server(*wanted, region_.bytes(), host_of(engine_.address()));
    if (!server) return server.status();
    Json answer = {{"floor", next_floor_}, {"port", static_cast<std::uint64_t>((*server)->port())}};
    if ((*server)->memfd() >= 0) answer["memfd"] = static_cast<std::uint64_t>((*server)->memfd());
    floors_.emplace(next_floor_++, std::move(*server));
    return answer;
  }

  Result<Json> close_floor(const Json& request) {
    floors_.erase(number_field(request, "floor").value_or(0));
    return Json::object();
  }

  Result<Json> bye(const Json&) {
    over_ = true;
    return Json::object();
  }

  Engine& engine_;
  NotificationLog& notifications_;
  Peer incoming_;
  const std::atomic<bool>& stop_;
  std::optional<Conversation> conversation_;
  Region region_;
  std::map<std::uint64_t, std::unique_ptr<FloorServer>> floors_;
  std::uint64_t next_floor_ = 1;
  bool echo_next_ = false;
  bool over_ = false;
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

bool is_listed(const std::vector<Peer>& peers, const Peer& peer) {
  return std::any_of(peers.begin(), peers.end(), [&](const Peer& one) {
    return one.name() == peer.name() && one.incarnation() == peer.incarnation();
  });
}

}  // namespace

void serve_initiators(Engine& engine, const std::atomic<bool>& stop) {
  NotificationLog notifications(engine);
  std::vector<Peer> known;
  std::list<Session> sessions;
  while (!stop) {
    const std::vector<Peer> peers = engine.peers();
    for (const Peer& peer : peers) {
      if (is_listed(known, peer)) continue;
      known.push_back(peer);
      sessions.emplace_back(engine, notifications, peer, stop);
    }
    std::erase_if(known, [&](const Peer& peer) { return !is_listed(peers, peer); });
    std::erase_if(sessions, [](const Session& session) { return session.ended(); });
    std::this_thread::sleep_for(20ms);
  }
}

}  // namespace kvferry::bench
