// The target's side: lets initiators in, gives them regions and takes these back. It copies nothing.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <kvferry/transports/shm/control_page.hpp>
#include <kvferry/transports/shm/port_parts.hpp>
#include <kvferry/transports/shm/protocol.hpp>
#include <kvferry/transports/shm/unix_socket.hpp>

namespace kvferry::shm {

/// Most connections that have not shown a valid token yet.
inline constexpr std::size_t max_strangers = 256;
/// How long the end of a connection waits for the portion that its initiator may be copying.
inline constexpr Duration quiet_limit = std::chrono::milliseconds(100);

class Server {
 public:
  static Result<std::unique_ptr<Server>> start(PortParts& parts);
  /// Ends all connections, within quiet_limit.
  ~Server();

  /// The name of the socket that initiators connect to.
  const std::string& address() const noexcept { return name_; }

  // ---- from Port::poll
  void on_listener();
  void on_connection(std::uint32_t id, std::uint32_t events);
  void tick(TimePoint now);

  /// True while something arrived that the engine has not accepted.
  bool stalled() const noexcept { return stalled_ > 0; }
  TimePoint next_wakeup(TimePoint now) const;

  bool release_region(RegionKey key, bool force);
  void drop_session(SessionId session);

 private:
  /// A notification or message that the engine has not accepted yet.
  struct Delivery {
    PacketKind kind{};
    std::uint64_t number = 0;
    std::uint64_t sequence = 0;
    std::uint32_t immediate = 0;
    std::vector<std::byte> bytes;
  };
  struct Outgoing {
    std::vector<std::byte> bytes;
    Fd passed;
  };
  struct Connection {
    std::uint32_t id = 0;
    Fd socket;
    TimePoint hello_by{};
    bool welcomed = false;
    SessionId session = 0;
    ControlPage page;
    std::unordered_set<std::uint64_t> given;  ///< regions: slot and generation
    std::deque<Delivery> stalled;
    std::deque<Outgoing> outgoing;
  };

  Server(std::string name, Fd listener, PortParts& parts);

  // Each returns false when the connection has to end.
  bool on_packet(Connection& connection, std::span<const std::byte> packet);
  bool on_hello(Connection& connection, std::span<const std::byte> packet);
  Status admit(Connection& connection, std::span<const std::byte> packet);
  bool on_region_request(Connection& connection, RegionKey key);
  bool on_delivery(Connection& connection, PacketKind kind, std::uint64_t number, std::uint64_t sequence,
                   std::uint32_t immediate, std::span<const std::byte> bytes);
  bool send(Connection& connection, std::span<const std::byte> bytes, Fd passed = {});
  bool flush(Connection& connection);

  bool offer(Connection& connection, PacketKind kind, std::uint64_t sequence, std::uint32_t immediate,
             std::span<const std::byte> bytes);
  void offer_stalled(Connection& connection);
  Status describe_region(SessionId session, RegionKey key, RegionReplyPacket& reply, Fd& memfd) const;

  void close_quietly(std::span<Connection* const> connections);
  void remove(std::uint32_t id);
  void resume_accepting(TimePoint now);

  const std::string name_;
  Fd listener_;
  PortParts& parts_;
  Nonce nonce_{};
  std::unordered_map<std::uint32_t, std::unique_ptr<Connection>> connections_;
  std::uint32_t next_id_ = 1;
  std::size_t strangers_ = 0;
  std::size_t stalled_ = 0;
  TimePoint accept_again_at_ = TimePoint::max();  ///< set while descriptors are used up
};

}  // namespace kvferry::shm
