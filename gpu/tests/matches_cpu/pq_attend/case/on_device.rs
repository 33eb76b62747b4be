//! The launch of a case on the device.

use kv_gpu::Device;
use kv_gpu::pq::{Addends, Attend, AttendArguments, ExactTokens, Norms, Pages};

use super::{Case, Inputs, Outputs, to_e4m3};
use crate::common::{Buffer, SIDES, launch, to_element, where_it_fits};

impl Case {
    /// Two launches, or `None` where the shape does not fit the device.
    pub fn run_on_device(&self, device: &Device, inputs: &Inputs) -> Option<Outputs> {
        let Self { shape, batch, heads, .. } = *self;
        let attend = where_it_fits(device, Attend::new(device, shape))?;
        let (group, dim) = (shape.group, shape.keys.dim());
        let elements = |x: &Vec<f32>| x.iter().map(|&x| to_element(shape.element, x)).collect::<Vec<u16>>();
        let [key_codes, value_codes] = SIDES.map(|side| Buffer::new(device, &self.tiles(inputs, side)));
        let [key_table, value_table] = SIDES.map(|side| Buffer::new(device, &self.tables(inputs, side)));
        let [exact_keys, exact_values] = inputs.exact.each_ref().map(|x| -> Buffer<u8> {
            let bytes: Vec<u8> = if shape.exact_fp8 {
                x.iter().copied().map(to_e4m3).collect()
            } else {
                elements(x).iter().flat_map(|bits| bits.to_le_bytes()).collect()
            };
            Buffer::new(device, &bytes)
        });
        let exact_factors = Buffer::new(device, inputs.exact_factors.as_flattened());
        let queries = Buffer::new(device, &elements(&inputs.queries));
        let page_table = Buffer::new(device, &self.page_table(inputs));
        let lengths = Buffer::new(device, &self.lengths);
        let exact_lengths = Buffer::new(device, &self.exact_lengths);
        let addends = Buffer::new(device, &self.addends(inputs));
        let [key_norms, value_norms] = SIDES.map(|side| Buffer::new(device, &self.norms(inputs, side)));
        let workspace = Buffer::new(device, &vec![0_u8; attend.workspace_len(batch, heads)]);
        let launch = || {
            let out = Buffer::new(device, &vec![u16::MAX; batch * heads * group * dim]); // NaN
            let log_sum_exp = Buffer::new(device, &vec![f32::NAN; batch * heads * group]);
            let arguments = AttendArguments {
                batch,
                heads,
                tiles: self.page_tiles,
                key_codes: key_codes.pointer(),
                value_codes: value_codes.pointer(),
                key_table: key_table.pointer(),
                value_table: value_table.pointer(),
                queries: queries.pointer().cast(),
                lengths: lengths.pointer(),
                pages: self
                    .paged()
                    .then(|| Pages { table: page_table.pointer(), max_pages: self.max_pages() }),
                addends: shape
                    .addends
                    .then(|| Addends { values: addends.pointer(), tiles: self.addend_tiles() }),
                norms: shape
                    .norms
                    .then(|| Norms { keys: key_norms.pointer(), values: value_norms.pointer() }),
                exact: (self.exact_capacity > 0).then(|| ExactTokens {
                    keys: exact_keys.pointer().cast(),
                    values: exact_values.pointer().cast(),
                    lengths: exact_lengths.pointer(),
                    capacity: self.exact_capacity,
                }),
                exact_factors: shape.exact_fp8.then(|| exact_factors.pointer()),
                scale: self.scale(),
                out: out.pointer().cast(),
                log_sum_exp: Some(log_sum_exp.pointer()),
                pdl: inputs.pdl,
                workspace: workspace.pointer(),
            };
            launch!(device, attend, &arguments);
            let log_sum_exp = log_sum_exp.read().iter().map(|x| x.to_bits()).collect();
            Outputs { out: out.read(), log_sum_exp }
        };
        let outputs = launch();
        assert!(launch() == outputs, "two runs differ");
        Some(outputs)
    }
}
