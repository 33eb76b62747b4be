//! The step of a case on the device.

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstream, CUstreamCaptureMode};
use kv_gpu::pq::{
    Addends, BlockMeans, ErrorBound, ExactRows, ExactTokens, Hybrid, HybridArguments, HybridShape, Pages,
    RowIndex, Select, SelectArguments, SelectShape, TILE,
};
use kv_gpu::{Device, DevicePtr};

use super::{Case, Index, Inputs, Outputs, RECENT_PARTS};
use crate::common::{Buffer, SIDES, launch, to_element, where_it_fits};

impl Case {
    /// Two runs, or with `graph` the second one from a graph that was captured with other lengths.
    /// `None` where the shape does not fit the device.
    pub fn run_on_device(&self, device: &Device, inputs: &Inputs, graph: bool) -> Option<Outputs> {
        let Self { shape, batch, heads, .. } = *self;
        let hybrid = where_it_fits(device, Hybrid::new(device, shape))?;
        let (group, dim) = (shape.group, shape.keys.dim());
        let elements = |x: &Vec<f32>| x.iter().map(|&x| to_element(shape.element, x)).collect::<Vec<u16>>();
        let [key_codes, value_codes] = SIDES.map(|side| Buffer::new(device, &self.tiles(inputs, side)));
        let [key_table, value_table] = SIDES.map(|side| Buffer::new(device, &self.tables(inputs, side)));
        let [exact_keys, exact_values] = inputs.exact.each_ref().map(|x| Buffer::new(device, &elements(x)));
        let rows = inputs.rows.each_ref().map(elements);
        let rows_there = rows.each_ref().map(|rows| Buffer::new(device, rows));
        let queries = Buffer::new(device, &elements(&inputs.queries));
        let code_queries = Buffer::new(device, &elements(&inputs.code_queries));
        let errors = Buffer::new(device, &inputs.errors);
        let value_errors = Buffer::new(device, &inputs.value_errors);
        let most: Vec<u32> = (0..batch * heads).map(|i| self.most(i / heads) as u32).collect();
        let found = Buffer::new(device, &if shape.adaptive { vec![u32::MAX; most.len()] } else { most });
        let total = Buffer::new(device, &[0_u64]);
        let page_table = Buffer::new(device, &self.page_table(inputs));
        let addends = Buffer::new(device, &self.addends(inputs));
        let [key_norms, value_norms] = SIDES.map(|side| Buffer::new(device, &self.norms(inputs, side)));
        let (means, recent) = self.block_means(inputs);
        let (means, recent) = (Buffer::new(device, &means), Buffer::new(device, &recent));
        let mean_errors = BlockMeans {
            means: means.pointer(),
            blocks: self.blocks(),
            recent: recent.pointer(),
            recent_parts: RECENT_PARTS,
            summed: DevicePtr::dangling(),
        };
        let mut lengths = Buffer::new(device, &self.lengths);
        let exact_lengths = Buffer::new(device, &self.exact_lengths);
        let ks = Buffer::new(device, &self.ks);
        let room = self.max_pages() * self.page_tiles * TILE;
        let workspace = Buffer::new(device, &vec![0_u8; hybrid.workspace_len(batch, heads, room)]);
        let selected = Buffer::new(device, &vec![u32::MAX; batch * heads * self.selected_len]);
        let slots: Vec<u32> = (0..self.selected_len as u32).rev().collect();
        let slots = Buffer::new(device, &slots.repeat(batch * heads));
        let collected =
            [(); 2].map(|()| Buffer::new(device, &vec![0_u16; batch * heads * self.selected_len * dim]));
        let out = Buffer::new(device, &vec![u16::MAX; batch * heads * group * dim]); // NaN
        let log_sum_exp = Buffer::new(device, &vec![f32::NAN; batch * heads * group]);
        let [row_keys, row_values] =
            if self.index == Index::Token { &rows_there } else { &collected }.each_ref();
        let arguments = HybridArguments {
            batch,
            heads,
            tiles: self.page_tiles,
            key_codes: key_codes.pointer(),
            value_codes: value_codes.pointer(),
            key_table: key_table.pointer(),
            value_table: value_table.pointer(),
            key_errors: self.has_errors.then(|| errors.pointer()),
            key_norms: shape.key_norms.then(|| key_norms.pointer()),
            value_norms: shape.value_norms.then(|| value_norms.pointer()),
            mean_errors: shape.mean_errors.then_some(mean_errors),
            queries: queries.pointer().cast(),
            code_queries: self.has_code_queries.then(|| code_queries.pointer().cast()),
            lengths: lengths.pointer(),
            pages: shape.paged.then(|| Pages { table: page_table.pointer(), max_pages: self.max_pages() }),
            addends: shape.addends.then(|| Addends { values: addends.pointer(), tiles: self.addend_tiles() }),
            ks: ks.pointer(),
            bound: shape.adaptive.then(|| ErrorBound {
                bound: self.bound,
                value_errors: value_errors.pointer(),
                found: found.pointer(),
                total: Some(total.pointer()),
            }),
            selected: selected.pointer(),
            selected_len: self.selected_len,
            rows: ExactRows {
                keys: row_keys.pointer().cast(),
                values: row_values.pointer().cast(),
                capacity: if self.index == Index::Token { self.capacity } else { self.selected_len },
                index: match self.index {
                    Index::Order => RowIndex::Order,
                    Index::Token => RowIndex::Token,
                    Index::List => RowIndex::List(slots.pointer()),
                },
                arriving: self.index != Index::Token,
            },
            exact: (self.exact_capacity > 0).then(|| ExactTokens {
                keys: exact_keys.pointer().cast(),
                values: exact_values.pointer().cast(),
                lengths: exact_lengths.pointer(),
                capacity: self.exact_capacity,
            }),
            scale: self.scale(),
            out: out.pointer().cast(),
            log_sum_exp: Some(log_sum_exp.pointer()),
            pdl: inputs.pdl,
            workspace: workspace.pointer(),
        };
        // SAFETY: the buffers live until their contents have been read, and have the lengths that the shape
        // requires.
        #[allow(unsafe_code)]
        let select = |stream: CUstream| unsafe { hybrid.select(stream, &arguments) }.unwrap();
        // SAFETY: as above.
        #[allow(unsafe_code)]
        let attend = |stream: CUstream| unsafe { hybrid.attend(stream, &arguments) }.unwrap();
        let stream = device.stream();
        let read = || Outputs {
            found: found.read(),
            selected: selected.read(),
            out: out.read(),
            log_sum_exp: log_sum_exp.read().iter().map(|x| x.to_bits()).collect(),
        };
        let mut collected = collected;
        let mut run = || {
            select(stream.cu_stream());
            if self.index != Index::Token {
                let (selected, found) = (selected.read(), found.read());
                for (collected, rows) in collected.iter_mut().zip(&rows) {
                    collected.write(&self.collect(rows, &selected, &found));
                }
            }
            attend(stream.cu_stream());
            read()
        };
        let outputs = run();
        if graph {
            lengths.write(&vec![0; batch]);
            stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
            select(stream.cu_stream());
            attend(stream.cu_stream());
            let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            let graph = stream.end_capture(flags).unwrap().unwrap();
            graph.launch().unwrap();
            lengths.write(&self.lengths);
            graph.launch().unwrap();
            assert!(read() == outputs, "{self:?}: a graph differs");
        } else {
            assert!(run() == outputs, "{self:?}: two runs differ");
            assert!(
                shape.adaptive || self.select_alone(device, &arguments) == outputs.selected,
                "{self:?}: pq::Select differs"
            );
        }
        let sum: u64 = if shape.adaptive { found.read().iter().map(|&n| u64::from(n)).sum() } else { 0 };
        assert_eq!(total.read(), [2 * sum], "{self:?}: the rows of two runs");
        Some(outputs)
    }

    /// The selection of [`Select`].
    pub fn select_alone(&self, device: &Device, step: &HybridArguments) -> Vec<u32> {
        let HybridShape { keys, group, element, rule, paged, addends, key_norms, .. } = self.shape;
        let shape = SelectShape { keys, group, element, rule, paged, addends, key_norms };
        let select = Select::new(device, shape).unwrap();
        let room = self.max_pages() * self.page_tiles * TILE;
        let workspace = Buffer::new(device, &vec![0_u8; select.workspace_len(step.batch, step.heads, room)]);
        let selected = Buffer::new(device, &vec![u32::MAX; step.batch * step.heads * step.selected_len]);
        let arguments = SelectArguments {
            batch: step.batch,
            heads: step.heads,
            tiles: step.tiles,
            codes: step.key_codes,
            table: step.key_table,
            norms: step.key_norms,
            errors: step.key_errors,
            queries: step.code_queries.unwrap_or(step.queries),
            lengths: step.lengths,
            pages: step.pages,
            addends: step.addends,
            ks: step.ks,
            selected: selected.pointer(),
            selected_len: step.selected_len,
            scale: step.scale,
            pdl: step.pdl,
            workspace: workspace.pointer(),
        };
        launch!(device, select, &arguments);
        selected.read()
    }
}
