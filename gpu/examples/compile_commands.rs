//! Prints `compile_commands.json` for clangd: every kernel file with the flags of one shape.
//!
//! `cargo example compile_commands > compile_commands.json`

use std::error::Error;

use codec_core::{Coder, FitOptions, ModelKind, PlaneBuf, PredictorKind, Steps, TransformBuf};
use kv_gpu::pq::{
    AppendShape, AttendGenericShape, AttendShape, EncodeGenericShape, EncodeShape, Gather, GatherAttendShape,
    LutShape, Paging, RopeMeanScoresShape, ScanShape, SearchShape, Side, TrainShape,
};
use kv_gpu::sq;
use kv_gpu::svd::{self, ProjectShape};
use kv_gpu::{Element, Program, VectorElement, codec, self_test_program};
use pq_core::{GroupRule, PqShape};

/// Compute capabilities of both siblings of a kernel, and the bytes of shared memory of a block.
const DEVICES: [((i32, i32), usize); 2] = [((8, 0), 163 << 10), ((9, 0), 227 << 10)];

fn programs() -> Result<Vec<Program>, Box<dyn Error>> {
    let (element, rows, group) = (Element::F16, VectorElement::F16, 4);
    let (fine, coarse) = (PqShape::new(128, 64, 8)?, PqShape::new(128, 2, 6)?);
    let (addends, norms, exact_fp8) = (true, true, true);
    let attend = AttendShape {
        keys: fine,
        values: fine,
        group,
        element,
        paging: Paging::Tiles,
        addends,
        norms,
        exact_fp8,
    };
    let encode = EncodeShape { quantizer: fine, side: Side::Keys, element: rows, paging: Paging::Tiles };
    let ragged = svd::AttendShape { dim: 128, element };
    let scalar = sq::AttendShape {
        dim: 128,
        key_slots: 24,
        uniform_keys: false,
        value_bits: 3,
        block: 256,
        group,
        element,
        mean_errors: true,
        addends: true,
        paged: true,
    };
    let coded_keys =
        sq::EncodeShape { dim: 128, side: sq::Side::Keys { slots: 24 }, block: 256, paged: true };
    let numbers: Vec<f32> = (0..64 * 256_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32).collect();
    let map = TransformBuf::new(128, vec![0.5; 256 * 128], vec![0.5; 256 * 128])?;
    let options = FitOptions {
        predictor: PredictorKind::Mean,
        steps: Steps::Deviations(0.5),
        models: ModelKind::Tables,
        coder: Coder::InterleavedRans,
    };
    let plane = PlaneBuf::fit(&numbers, 256, Some(map.into()), &options)?;
    let planes = codec::Planes::pack(&[plane.view()], 128)?.shape(rows, true);
    let mut programs = vec![
        self_test_program(),
        attend.program(DEVICES[1].1)?,
        RopeMeanScoresShape { dim: 128, group, element }.program()?,
        AttendGenericShape { keys: fine, values: fine, group }.program()?,
        encode.program()?,
        AppendShape { keys: fine, values: fine, element: rows, paging: Paging::Tiles }.program()?,
        EncodeGenericShape { quantizer: coarse, element: rows }.program()?,
        TrainShape { quantizer: coarse, element: rows }.program()?,
        LutShape { quantizer: coarse, group, element: rows }.program()?,
        ScanShape { quantizer: coarse, group }.program(DEVICES[1].1)?,
        GatherAttendShape { dim: 128, element }.program()?,
        ragged.program()?,
        coded_keys.program()?,
        sq::EncodeShape { side: sq::Side::Values { bits: 3 }, ..coded_keys }.program()?,
        sq::DecodeShape { coded: coded_keys, element: rows }.program()?,
        planes.decode_program(),
        planes.encode_program(),
        codec::Encode::join_program(),
    ];
    programs.extend(scalar.programs(DEVICES[1].1)?);
    programs.push(scalar.queries_program(DEVICES[1].1)?);
    programs.extend(
        [planes.transform_program(), planes.points_program(), planes.quantize_program()]
            .into_iter()
            .flatten(),
    );
    for (capability, shared_memory) in DEVICES {
        let rule = GroupRule::SumOfSoftmax;
        programs.push(Gather::program(256, capability)?);
        programs.push(SearchShape { quantizer: coarse, group, rule }.program(capability, shared_memory)?);
        programs.push(ProjectShape { dim: 128, rank: 64, element }.program(capability)?);
        programs.push(svd::Prefill::program(ragged, capability)?);
        programs.push(svd::GramShape { dim: 128, element }.program(capability)?);
    }
    Ok(programs)
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/kernels");
    let command = |program: &Program| {
        let defines =
            program.shape_options().iter().map(|define| format!(", {define:?}")).collect::<String>();
        let flags = r#""clang++", "-xcuda", "-std=c++17", "-nocudalib", "--cuda-gpu-arch=sm_90a", "-I.""#;
        let path = program.path();
        format!(
            r#"  {{"directory": {folder:?}, "file": {path:?}, "arguments": [{flags}{defines}, {path:?}]}}"#
        )
    };
    println!("[\n{}\n]", programs()?.iter().map(command).collect::<Vec<_>>().join(",\n"));
    Ok(())
}
