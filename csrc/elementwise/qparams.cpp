#include "elementwise/qparams.h"

#include <algorithm>
#include <cmath>

namespace zeropoint::elementwise {

Qparams choose_qparams(double low, double high, int64_t quant_min, int64_t quant_max) {
  constexpr double kSmallScale = 6.1e-5;
  const double least = static_cast<double>(quant_min), most = static_cast<double>(quant_max), steps = most - least;
  low = std::min(low, 0.0);
  high = std::max(high, 0.0);
  double scale = (high - low) / steps;
  const float narrow = static_cast<float>(scale);
  if (narrow == 0.0f || std::isinf(1.0f / narrow)) scale = 0.1;
  if (scale < kSmallScale) {
    const double stretch = kSmallScale / scale;
    if (low == 0.0) {
      high = kSmallScale * steps;
    } else if (high == 0.0) {
      low = -(kSmallScale * steps);
    } else {
      low = low * stretch;
      high = high * stretch;
    }
    scale = kSmallScale;
  }
  const double error_low = std::abs(least) - std::abs(low / scale);
  const double error_high = std::abs(most) - std::abs(high / scale);
  const double zero = error_low < error_high ? least - low / scale : most - high / scale;
  return {scale, static_cast<int64_t>(std::nearbyint(std::clamp(zero, least, most)))};
}

}  // namespace zeropoint::elementwise
