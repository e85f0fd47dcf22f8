// The bootstrap actor: owns the control sockets. A ROUTER answers peers, one DEALER per endpoint asks.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <zmq.hpp>

#include <kvferry/actors/bootstrap_service.hpp>
#include <kvferry/actors/caf.hpp>

namespace kvferry {

/// CurveZMQ settings (RFC 26/CurveZMQ); empty secret key means no encryption and no authentication.
struct CurveKeys {
  std::string public_key;
  std::string secret_key;
  std::string server_key;              ///< expected of engines that we connect to
  std::vector<std::string> peer_keys;  ///< who may connect to us; empty: anyone with a key pair
};

/// The bound listening socket, made by the starting thread so that a port in use is an error there.
class ControlListener {
 public:
  static Result<ControlListener> bind(zmq::context_t& context, const std::string& address, const CurveKeys& keys);

  /// tcp://HOST:PORT with the real port.
  const std::string& address() const { return address_; }
  zmq::socket_t& router() { return router_; }
  zmq::socket_t& zap() { return zap_; }

 private:
  zmq::socket_t router_;
  zmq::socket_t zap_;  ///< ZeroMQ's authentication protocol (RFC 27/ZAP); unused without keys
  std::string address_;
};

/// Blocking and detached: polls its sockets and a wake-up descriptor that enqueue() writes when the
/// thread sleeps.
class BootstrapActor final : public caf::blocking_actor {
 public:
  BootstrapActor(caf::actor_config& config, zmq::context_t* context, ControlListener listener,
                 std::shared_ptr<BootstrapService> service, CurveKeys keys, Duration session_limit);
  ~BootstrapActor() override;

  void enqueue(caf::mailbox_element_ptr element, caf::execution_unit* unit) override;
  void act() override;

 private:
  struct Line {
    zmq::socket_t dealer;
    caf::actor endpoint;
  };

  void receive_some();
  void dial(const Dial& dial);
  void hang_up(std::uint64_t number);
  void send_port_answer(const PortAnswered& answered);
  void send_control(const SendControl& control);
  void serve_router();
  void serve_zap();
  void serve_line(Line& line);
  void sleep();

  zmq::context_t* context_;
  ControlListener listener_;
  std::shared_ptr<BootstrapService> service_;
  const CurveKeys keys_;
  const Duration session_limit_;
  std::unordered_map<std::uint64_t, Line> lines_;
  std::atomic<bool> asleep_{false};
  int wake_fd_ = -1;
  bool stopping_ = false;
};

}  // namespace kvferry
