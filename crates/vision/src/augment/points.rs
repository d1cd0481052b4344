//! Geometric transforms of points.

use brigade_torch::{Error, Result};
use tch::{Kind, TchError, Tensor};

use super::{Augment, refused};

impl Augment {
    /// Transforms points `[n, points, 2]`, `(x, y)` from -1 to 1 between the sides of the images, like the images of
    /// the same batch. `images` are the images before [`apply`](Self::apply); only their size is used.
    ///
    /// # Errors
    /// Returns the errors of [`Augment::apply`].
    pub fn apply_to_points(
        &self,
        points: &Tensor,
        drawn: &Tensor,
        images: &Tensor,
    ) -> Result<Tensor> {
        let size = images.size();
        let &[_, _, height, width] = size.as_slice() else {
            return Err(Error::invalid_argument(format!(
                "points belong to images [n, c, h, w], not to {size:?}"
            )));
        };
        let drawn = self.checked(points, drawn)?;
        let mapped = || {
            let from = [width as f64, height as f64];
            let to = self.size.map_or(from, |size| [f64::from(size.width), f64::from(size.height)]);
            let points_of = points.f_to_kind(Kind::Double)?;
            let axis = |index: usize| -> Result<Tensor, TchError> {
                let along = points_of.f_select(2, index as i64)?.f_add_scalar(1.0)?;
                along.f_mul_scalar(from[index] / 2.0)?.f_sub_scalar(0.5)
            };
            let (x, y) = (axis(0)?, axis(1)?);
            // The maps lead from the output to the image. Their adjugates are inverses up to a factor, which does not
            // change a homography; libtorch's own inverse would make the host wait for a GPU.
            let map = |index: i64| -> Result<Tensor, TchError> {
                drawn.f_narrow(1, index, 1)?.f_to_kind(Kind::Double)
            };
            let m = (0..9).map(map).collect::<Result<Vec<_>, _>>()?;
            let minor = |[a, b, c, d]: [usize; 4]| m[a].f_mul(&m[d])?.f_sub(&m[b].f_mul(&m[c])?);
            let row = |of_x: [usize; 4], of_y: [usize; 4], of_one: [usize; 4]| {
                let (a, b, c) = (minor(of_x)?, minor(of_y)?, minor(of_one)?);
                x.f_mul(&a)?.f_add(&y.f_mul(&b)?)?.f_add(&c)
            };
            let across = row([4, 5, 7, 8], [2, 1, 8, 7], [1, 2, 4, 5])?;
            let down = row([5, 3, 8, 6], [0, 2, 6, 8], [2, 0, 5, 3])?;
            let depth = row([3, 4, 6, 7], [1, 0, 7, 6], [0, 1, 3, 4])?;
            let place = |along: &Tensor, length: f64| {
                let along = along.f_div(&depth)?.f_add_scalar(0.5)?;
                along.f_mul_scalar(2.0 / length)?.f_sub_scalar(1.0)
            };
            let found = Tensor::f_stack(&[place(&across, to[0])?, place(&down, to[1])?], 2)?;
            found.f_to_kind(points.kind())
        };
        mapped().map_err(refused)
    }
}
