// Copies between a device and the host's memory that run beside the computation.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace brigade {

// A stream of a device for the copies of one direction.
class CopyStream {
 public:
  explicit CopyStream(c10::Device device)
      : device_(device),
        guard_(device.type()),
        stream_(guard_.getStreamFromGlobalPool(device, /*isHighPriority=*/true)) {}

  // Has what `run` gives to the device wait for what the current stream was given, and go on beside what that gets next.
  // Returns the event behind it.
  template <typename Run>
  c10::Event behind_current(Run run) {
    c10::Event begin(device_.type());
    begin.record(guard_.getStream(device_));
    begin.block(stream_);
    const auto before = guard_.exchangeStream(stream_);
    try {
      run();
    } catch (...) {
      guard_.exchangeStream(before);
      throw;
    }
    guard_.exchangeStream(before);
    c10::Event end(device_.type());
    end.record(stream_);
    return end;
  }

  // Has the current stream wait for an event.
  void follow(const c10::Event& event) const {
    event.block(guard_.getStream(device_));
  }

  // Has the host wait for all that was given to this stream.
  void synchronize() const {
    // By an event: libtorch refuses to wait for a stream while a thread has waits forbidden.
    c10::Event done(device_.type());
    done.record(stream_);
    done.synchronize();
  }

 private:
  c10::Device device_;
  c10::impl::VirtualGuardImpl guard_;
  c10::Stream stream_;
};

} // namespace brigade
