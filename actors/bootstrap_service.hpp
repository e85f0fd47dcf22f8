// What an engine answers to control messages: handshakes, pings, region look-ups. No sockets, no
// actors: bytes in, bytes out.
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <kvferry/actors/peer_table.hpp>
#include <kvferry/runtime/messages.hpp>
#include <kvferry/runtime/metrics.hpp>
#include <kvferry/runtime/region_table.hpp>

namespace kvferry {

/// Facts about this engine that a welcome carries.
struct EngineIdentity {
  std::string name;
  std::uint64_t incarnation = 0;
  std::string host_id;
  std::string data_host;  ///< what peers are told to connect data sockets to; may be empty
};

class BootstrapService {
 public:
  struct Parts {
    EngineIdentity identity;
    PeerTable* peers = nullptr;
    RegionTable* regions = nullptr;
    MetricCounters* metrics = nullptr;
    /// Transport → descriptor of a region, as given at registration.
    std::function<std::vector<std::pair<std::string, std::string>>(RegionKey)> descriptors;
    /// Has a port of this engine answer a peer's port; calls back with the answer, on any thread. May be empty.
    std::function<void(const ChannelMessage&, std::function<void(Result<std::string>)>)> serve_port;
    /// Ends the connections of a session that is over.
    std::function<void(SessionId, const Status&)> drop_session;
  };

  explicit BootstrapService(Parts parts) : parts_(std::move(parts)) {}

  /// Once the data ports are open. Before that, hellos are refused.
  void set_ports(std::vector<PortAdvert> ports);

  /// The answer to one message of a peer, or nothing (bye, malformed bytes). Never throws.
  std::optional<std::string> answer(std::span<const std::byte> bytes, TimePoint now) { return answer(bytes, now, {}); }
  /// The same; an answer that takes a port's thread is given to `later` with its message id, on any thread.
  std::optional<std::string> answer(std::span<const std::byte> bytes, TimePoint now,
                                    const std::function<void(std::uint64_t, Result<std::string>)>& later);
  /// The message that tells a peer what its port's request came to.
  static std::string encode_port_answer(std::uint64_t id, const Result<std::string>& answer);

  /// Ends sessions that showed no sign of life since `limit`.
  void expire_sessions(TimePoint limit);

 private:
  ControlBody reply(const HelloMessage& hello, TimePoint now);
  ControlBody reply(const PingMessage& ping, TimePoint now);
  ControlBody reply(const FindRegionMessage& find, TimePoint now);
  ControlBody refuse(Errc code, std::string text);
  void end_session(std::uint64_t incarnation, const Status& why);
  RemoteRegion describe(const RegionRecord& record) const;

  const Parts parts_;
  std::vector<PortAdvert> ports_;
};

}  // namespace kvferry
