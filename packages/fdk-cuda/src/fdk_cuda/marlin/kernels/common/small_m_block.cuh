// Products of a block with x, added to the sums of its outputs: the body of the loop over the
// blocks of a stage in small_m.cu and small_m_experts.cu. As a function it would change the machine
// code of small_m.cu.
//
// Uses block (pointer), n_block, k_block, slot, g, x, rows, table and constants; adds to sum and
// x_sum.
uint32 words[LANE_WORDS];
load_words(words, block, slot);
Scales scales;
scales.load(block, g);
if constexpr (SCALES_WEIGHTS) {
  add_scaled(sum, n_block * FRAGMENTS, words, scales, x, k_block, table, constants);
  continue;
}
#pragma unroll
for (int half = 0; half < PER_ROW; half++) {
  float d[FRAGMENTS][M_TILES][4];
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
    for (int c = 0; c < M_TILES; c++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        d[f][c][e] = COMPUTES_FRAGMENT && f % 2 && !(SPREAD && e % 2)
                         ? rows.based[k_block][half][c][e % COLUMNS]
                         : 0.f;
#pragma unroll
  for (int s = half * STEPS / PER_ROW; s < (half + 1) * STEPS / PER_ROW; s++)
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
      uint32 a[REGISTERS];
      decode(a, words, f, s, table, constants);
#pragma unroll
      for (int c = 0; c < M_TILES; c++)
        multiply(d[f][c], a, x.word(k_block, s, c, 0), x.word(k_block, s, c, 1));
    }
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
    for (int e = 0; e < VALUES; e++) {
      const float scale = scales.get(0, half, f, e / COLUMNS);
#pragma unroll
      for (int c = 0; c < M_TILES; c++) {
        float value = d[f][c][value_index(e)];
        if (AFFINE)
          value = fmaf(-scales.get(KINDS - 1, half, f, e / COLUMNS),
                       rows.x[k_block][half][c][e % COLUMNS], value);
        float& total_sum = sum[n_block * FRAGMENTS + f][c][e];
        total_sum = fmaf(scale, value, total_sum);
        if (KEEPS_X_SUM && f % 2)
          x_sum[n_block][c][e] =
              fmaf(scale, rows.x[k_block][half][c][e % COLUMNS], x_sum[n_block][c][e]);
      }
    }
}
