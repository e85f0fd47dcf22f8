// One error enum for the whole of kvferry, and the two types that carry it.
#pragma once

#include <cassert>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace kvferry {

/// Why an operation did not succeed. Values are part of the wire protocol: never renumber.
enum class Errc : std::uint16_t {
  ok = 0,
  invalid_argument = 1,     ///< the call itself is wrong; nothing was started
  timed_out = 2,            ///< the deadline passed; the transfer is quiet
  cancelled = 3,            ///< the caller cancelled; the transfer is quiet
  peer_lost = 4,            ///< the peer's process or host cannot be reached any more
  stale_peer = 5,           ///< the peer restarted: this handle means its former life
  unknown_region = 6,       ///< the peer has no region of that name or key
  out_of_bounds = 7,        ///< a slice leaves its region
  access_denied = 8,        ///< the region does not allow this operation, or the peer is not known
  corrupted = 9,            ///< bytes arrived that fail their check
  no_path = 10,             ///< no transport joins the two regions
  already_exists = 11,      ///< name or memory range is registered already
  address_in_use = 12,      ///< the port to listen on is taken
  unreachable = 13,         ///< nobody answered at the address, or the name does not resolve
  version_mismatch = 14,    ///< the peer speaks another protocol version
  too_large = 15,           ///< beyond a fixed limit named in the text
  resource_exhausted = 16,  ///< memory, descriptors, memlock: the text names the limit
  channel_error = 17,       ///< one connection broke; the work may be tried on another
  shutting_down = 18,       ///< the engine is being destroyed
  unsupported = 19,         ///< not built in, or not possible on this machine
  malformed = 20,           ///< a message or file that does not follow its format
  internal = 21,            ///< a defect of kvferry; please report
};

/// The field's name for a code, such as "peer_lost".
std::string_view to_string(Errc code) noexcept;

/// An error code with a text, or success. Success costs no allocation; copies share the text.
class [[nodiscard]] Status {
 public:
  Status() noexcept = default;
  Status(Errc code, std::string text);

  static Status ok() noexcept { return {}; }

  bool is_ok() const noexcept { return code_ == Errc::ok; }
  explicit operator bool() const noexcept { return is_ok(); }
  Errc code() const noexcept { return code_; }
  /// What happened, where, and what to do. Empty for success.
  std::string_view text() const noexcept { return text_ ? std::string_view(*text_) : std::string_view(); }
  /// "peer_lost: ..." or "ok".
  std::string to_string() const;
  /// The same code with `where` put before the text.
  Status with_context(std::string_view where) const;

  friend bool operator==(const Status& a, Errc code) noexcept { return a.code_ == code; }

 private:
  Errc code_ = Errc::ok;
  std::shared_ptr<const std::string> text_;
};

/// Thrown by Result::value() alone: kvferry itself reports errors by value.
class StatusError : public std::runtime_error {
 public:
  explicit StatusError(Status status) : std::runtime_error(status.to_string()), status_(std::move(status)) {}
  const Status& status() const noexcept { return status_; }

 private:
  Status status_;
};

/// A value, or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : content_(std::in_place_index<0>, std::move(value)) {}        // NOLINT(google-explicit-constructor)
  Result(Status status) : content_(std::in_place_index<1>, std::move(status)) {  // NOLINT(google-explicit-constructor)
    assert(!std::get<1>(content_).is_ok());
  }
  Result(Errc code, std::string text) : Result(Status(code, std::move(text))) {}

  bool is_ok() const noexcept { return content_.index() == 0; }
  explicit operator bool() const noexcept { return is_ok(); }

  Status status() const { return is_ok() ? Status() : std::get<1>(content_); }

  /// The value; throws StatusError when there is none.
  T& value() & {
    require();
    return std::get<0>(content_);
  }
  const T& value() const& {
    require();
    return std::get<0>(content_);
  }
  T&& value() && {
    require();
    return std::get<0>(std::move(content_));
  }

  /// The value; undefined when there is none.
  T& operator*() & { return std::get<0>(content_); }
  const T& operator*() const& { return std::get<0>(content_); }
  T&& operator*() && { return std::get<0>(std::move(content_)); }
  T* operator->() { return &std::get<0>(content_); }
  const T* operator->() const { return &std::get<0>(content_); }

 private:
  void require() const {
    if (!is_ok()) throw StatusError(std::get<1>(content_));
  }
  std::variant<T, Status> content_;
};

}  // namespace kvferry
